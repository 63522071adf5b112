"""Prompts with pictures: packed rows are those of transformers one by one, and tokens are pictures by
place."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_run_config
from small_vision import FAMILIES, Prompts, batch_of, log_probs_alone, picture, write_model
from torch import nn
from transformers import AutoModelForImageTextToText

from verl_rc.config.models import ModelConfig
from verl_rc.records.pictures import Pictures
from verl_rc.runtime.workers import supported_models
from verl_rc.runtime.workers.forward import ForwardOptions, packed_logits, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm
from verl_rc.runtime.workers.lora import add_adapters
from verl_rc.runtime.workers.packing import PrefixSharing
from verl_rc.runtime.workers.supported_models import unsupported_model
from verl_rc.runtime.workers.vision import freeze_tower, require_frozen_tower

QUESTION = "how many squares? <image>"
ROWS: list[tuple[str, list[bytes], list[int]]] = [
    (QUESTION, [picture(1)], [70, 71, 72]),
    ("plain text", [], [5, 6]),
    ("<image>and<image>: which?", [picture(2, 56, 84), picture(1)], [9] * 9),
    (QUESTION, [picture(1)], [70, 81, 33]),
    (QUESTION, [picture(7)], [70, 81, 33]),
]
RESPONSES = [response for _, _, response in ROWS]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write_model(tmp_path, request.param)


def prompts(folder: str) -> list[tuple[list[int], Pictures | None]]:
    made = Prompts(folder)
    return [made.encode(text, *images) for text, images, _ in ROWS]


def gradients(model: nn.Module, scores: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    sum((score * torch.linspace(-1, 1, len(score))).sum() for score in scores).backward()  # type: ignore[union-attr]
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("shares", [False, True])
def test_packed_rows_are_those_of_transformers(folder: str, shares: bool) -> None:
    reader, rows = Prompts(folder).reader, prompts(folder)
    plain: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    expected = [
        log_probs_alone(plain, reader, *row, response) for row, response in zip(rows, RESPONSES, strict=True)
    ]
    sharing = PrefixSharing()
    options = ForwardOptions(prefixes=sharing if shares else None)
    model = load_causal_lm(folder, torch.float32).eval()
    scores = score_tokens(model, batch_of(rows, RESPONSES), options, with_entropy=False).log_probs
    found = [row[: len(response)] for row, response in zip(scores, RESPONSES, strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    of_plain, of_packed = gradients(plain, expected), gradients(model, found)
    assert of_plain.keys() == of_packed.keys()
    for name, value in of_plain.items():
        assert float((of_packed[name] - value).norm() / value.norm()) < 1e-4, name
    # The first and the fourth row share their prompt and one token, and no other row shares any.
    assert not shares or sharing.take_fraction().total == len(rows[0][0]) + 1


def test_another_picture_is_another_row(folder: str) -> None:
    """The third row's prompt has the same tokens as the first's, with another picture."""
    made = Prompts(folder)
    rows = [made.encode(QUESTION, picture(seed)) for seed in (1, 7)]
    assert rows[0][0] == rows[1][0]
    model = load_causal_lm(folder, torch.float32).eval()
    options = ForwardOptions(prefixes=PrefixSharing())
    scores = score_tokens(model, batch_of(rows, [[70, 81, 33]] * 2), options, with_entropy=False).log_probs
    assert (scores[0] - scores[1]).abs().max() > 1e-3


def test_a_sampled_placeholder_is_no_picture(folder: str) -> None:
    """transformers takes it for one and says that the features do not suffice."""
    made = Prompts(folder)
    row = made.encode(QUESTION, picture(1))
    response = [70, made.reader.token_id, 71]
    model = load_causal_lm(folder, torch.float32).eval()
    scores = score_tokens(model, batch_of([row], [response]), ForwardOptions(), False).log_probs
    assert scores.isfinite().all()
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with pytest.raises(ValueError, match="features and image tokens do not match"):
        log_probs_alone(plain, made.reader, *row, response)


def test_rows_without_pictures_enter_the_tower_and_train_none_of_it(folder: str) -> None:
    model: Any = load_causal_lm(folder, torch.float32)
    entered = []
    model.base_model.visual.register_forward_hook(lambda *_: entered.append(1))
    made = Prompts(folder)
    scores = score_tokens(model, batch_of([made.encode("text")], [[5, 6]]), ForwardOptions(), False).log_probs
    scores.sum().backward()
    assert entered == [1]
    of_tower = [weight.grad for name, weight in model.named_parameters() if ".visual." in name]
    assert sum(float(grad.abs().sum()) for grad in of_tower if grad is not None) == 0
    assert float(model.lm_head.weight.grad.abs().sum()) > 0


def test_a_frozen_tower_gets_no_gradient(folder: str) -> None:
    model: Any = load_causal_lm(folder, torch.float32)
    freeze_tower(model)
    made = Prompts(folder)
    row = made.encode(QUESTION, picture(1))
    score_tokens(model, batch_of([row], [[5, 6]]), ForwardOptions(), False).log_probs.sum().backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is None} == {
        name for name, _ in model.named_parameters() if ".visual." in name
    }


def test_a_prompt_whose_placeholders_were_cut_is_refused(folder: str) -> None:
    token_ids, pictures = Prompts(folder).encode(QUESTION, picture(1))
    model = load_causal_lm(folder, torch.float32)
    cut = [token for place, token in enumerate(token_ids) if place != len(token_ids) - 4]
    with pytest.raises(ValueError, match="picture 1 of a prompt needs 4 placeholders in a row"):
        packed_logits(model, torch.tensor(cut), [len(cut)], pictures=[pictures])


MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (["actor_rollout_ref.exact=True"], "exact mode: drop actor_rollout_ref.exact"),
        ([f"{MODEL}.use_remove_padding=False"], "pass .*use_remove_padding=True"),
        ([f"{MODEL}.lora_rank=8"], "pass actor_rollout_ref.model.exclude_modules='.*visual.*'"),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.exclude_modules='.*visual.*'"], None),
        ([f"{MODEL}.lora_rank=8", "actor_rollout_ref.actor.freeze_vision_tower=False"], None),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=False"], "adapters in an engine: pass .*merge=True"),
        (["actor_rollout_ref.rollout.quantization=fp8_per_channel"], "drop .*rollout.quantization"),
        (["critic.enable=True"], "with a critic: choose an estimator without one"),
        (
            [
                "trainer.n_gpus_per_node=2",
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            ],
            "ranks that share a row: pass .*ulysses_sequence_parallel_size=1",
        ),
    ],
)
def test_what_is_refused(
    overrides: list[str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported_models, "find_spec", lambda _: True)
    write_model(tmp_path, "qwen3_vl")
    config = small_run_config(tmp_path, *overrides)
    problem = unsupported_model(config, str(tmp_path), trust_remote_code=False)
    assert problem is None if said is None else re.search(said, problem or "")


def test_a_reference_that_reads_no_pictures_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported_models, "find_spec", lambda _: True)
    policy = write_model(tmp_path / "policy", "qwen3_vl")
    for family, said in (("qwen3_vl", None), ("qwen2_5_vl", "the reference .* is of the family qwen2_5_vl")):
        reference = write_model(tmp_path / family, family)
        config = small_run_config(
            Path(policy),
            "actor_rollout_ref.actor.use_kl_loss=True",
            f"actor_rollout_ref.ref.model_path={reference}",
        )
        problem = unsupported_model(config, policy, trust_remote_code=False)
        assert problem is None if said is None else re.search(said, problem or "")


@pytest.mark.parametrize(
    ("modules", "frozen"), [(["q_proj", "gate_proj", "linear_fc1"], False), (["q_proj", "k_proj"], True)]
)
def test_adapters_do_not_train_a_frozen_tower(folder: str, modules: list[str], frozen: bool) -> None:
    model = load_causal_lm(folder, torch.float32)
    freeze_tower(model)
    config = ModelConfig(path=folder, lora_rank=2, target_modules=modules)
    adapted = add_adapters(model, config)
    if frozen:
        require_frozen_tower(adapted)
        return
    with pytest.raises(ValueError, match="the vision tower is frozen, and adapters would train it"):
        require_frozen_tower(adapted)


def test_a_model_is_refused_where_torchvision_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported_models, "find_spec", lambda _: None)
    write_model(tmp_path, "qwen3_vl")
    problem = unsupported_model(small_run_config(tmp_path), str(tmp_path), trust_remote_code=False)
    assert "imports torchvision, which is not installed" in (problem or "")


def test_other_families_that_read_pictures_are_refused(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    Gemma3Config().save_pretrained(tmp_path)
    problem = unsupported_model(small_run_config(tmp_path), str(tmp_path), trust_remote_code=False)
    assert "is of the family gemma3: those of qwen2_5_vl, qwen3_vl are proven" in (problem or "")
