"""Families of models: a real engine and the trainer compute the same, before and after updates of each kind
of weight."""

from pathlib import Path

import pytest
from families import FAMILIES, FULL, RECURRENT, model_of, move
from small_engines import engine_of, largest_gap, sampled_log_probs
from small_vision import use_torchvision
from transformers import PreTrainedModel

from verl_rc.runtime.weight_sync.sender import every_name

ROUNDING = 5e-5
"""In nats: both sides compute in float32."""
PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(4 + 5 * row)] for row in range(8)]
"""Of 4 to 39 tokens, so that some are shorter than a window and others much longer."""


def kinds(model: PreTrainedModel) -> dict[str, list[str]]:
    """The parameters of each kind, whatever their layer."""
    found: dict[str, list[str]] = {"all": []}
    for name, _ in model.named_parameters():
        stem = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", maxsplit=1)[-1]
        for kind in ("all", stem):
            found.setdefault(kind, []).append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_weight_reaches_the_engine(family: str, tied: bool, tmp_path: Path) -> None:
    model = model_of(family, tied)
    with engine_of(model, tmp_path) as engine:
        engine.call("load", dict(every_name(model)), 1, "float32")
        assert largest_gap(engine, model, PROMPTS) < ROUNDING
        for version, (kind, names) in enumerate(kinds(model).items(), 2):
            move(model, 0.1, names)
            assert largest_gap(engine, model, PROMPTS) > 100 * ROUNDING, kind
            engine.call("load", dict(every_name(model)), version, "float32")
            assert largest_gap(engine, model, PROMPTS) < ROUNDING, kind


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_an_engine_in_bfloat16_is_as_far_as_rounding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own, of the weights that the engine has, before and after updates of each kind."""
    if family == "qwen3_5_text":
        use_torchvision(monkeypatch)
    model = model_of(family)
    half, weights = model_of(family).bfloat16(), dict(every_name(model))
    with engine_of(model, tmp_path, dtype="bfloat16", enable_prefix_caching=False) as engine:
        for version, (kind, names) in enumerate([("", []), *kinds(model).items()], 1):
            move(model, 0.1, names)
            for side in (half, model):  # the engine has no more digits
                side.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
            if kind:
                sampled, trained = sampled_log_probs(engine, [model], PROMPTS)
                assert float((sampled - trained).abs().mean()) > 1e-3, kind
            [receipt] = engine.call("load", weights, version)
            assert (receipt.not_loaded, receipt.unread) == ([], [])
            sampled, own, exact = sampled_log_probs(engine, [half, model], PROMPTS)
            rounding = float((own - exact).abs().mean())

            assert float((sampled - exact).abs().mean()) < 1.5 * rounding, kind


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FULL)
def test_all_that_is_sent_is_used_and_all_that_is_there_is_filled(
    family: str, tied: bool, tmp_path: Path
) -> None:
    """vLLM's class of Cohere computes logits with the embedding, whatever the configuration says. The
    router of GLM has a bias that is a buffer: the engine keeps what it read from the checkpoint."""
    model = model_of(family, tied)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3)
    ignores_head = family == "cohere" and not tied
    with engine_of(model, tmp_path) as engine:
        [receipt] = engine.call("load", dict(every_name(model)), 1, "float32")
        assert (largest_gap(engine, model, PROMPTS) < ROUNDING) != ignores_head
    assert receipt.not_loaded == []
    assert receipt.unread == (["lm_head.weight"] if ignores_head else [])


def test_an_update_that_vllm_drops_and_reports_as_loaded_is_seen(tmp_path: Path) -> None:
    """Without the patch of the loader: vLLM copies gpt-oss' experts and sinks into tensors without memory."""
    model = model_of("gpt_oss")
    with engine_of(model, tmp_path, "loaded_engine:DroppingEngine") as engine:
        [receipt] = engine.call("load", dict(every_name(model)), 1, "float32")
    kinds_of_weights = {name.rpartition(".")[-1] for name in receipt.not_loaded}
    assert kinds_of_weights == {"sinks", "w13_weight", "w2_weight", "w13_bias", "w2_bias"}
