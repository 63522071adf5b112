"""``what-if --gradients``: what is said of presets is what a float64 loop over the tokens of a small model
finds."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_series import healthy, write_run
from recorded_tokens import token_record, write_tokens
from small_checkpoints import write_tiny_model
from small_models import small_run_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_rc.cli import main
from verl_rc.config.load import save_resolved_config
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.insight.replay.gradients import ParameterGradients
from verl_rc.insight.replay.rows import NothingToReplayError
from verl_rc.insight.what_if import Estimate, estimate_presets

LENGTHS = (5, 2, 4, 3, 6, 4)
OF_PROMPT = (0, 0, 1, 1, 2, 2)
PROMPTS = [[49, 50, 51, 52][: 1 + row % 4] for row in range(len(LENGTHS))]
RESPONSES = [
    [48 + (3 * row + position) % 10 for position in range(length)] for row, length in enumerate(LENGTHS)
]
ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.0, 1.5]
LOGS = [
    [0.3 * math.sin(5 * row + 2 * position) for position in range(length)]
    for row, length in enumerate(LENGTHS)
]
CONFIGS = {
    "none": RolloutCorrectionConfig(),
    "token": RolloutCorrectionConfig.model_validate({"rollout_is": "token", "rollout_is_threshold": 1.1}),
    "filter": RolloutCorrectionConfig.model_validate(
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}
    ),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", healthy(4))
    save_resolved_config(small_run_config(model_folder), folder)
    # The last row was not drawn at random, and stands first in the record.
    order, lengths = [5, 0, 1, 2, 3, 4, 5], [LENGTHS[5], *LENGTHS]
    train = np.full(sum(lengths), -1.0, "float32")
    record = token_record(
        1,
        lengths,
        chosen_by=["worst", *["random"] * 6],
        group=[2, *OF_PROMPT],
        prompts=[np.array(PROMPTS[row]) for row in order],
        response_ids=np.concatenate([np.array(RESPONSES[row]) for row in order]),
        advantage=np.concatenate([np.full(LENGTHS[row], ADVANTAGES[row], "float32") for row in order]),
        old_log_prob=train,
        rollout_log_prob=train - np.concatenate([np.array(LOGS[row], "float32") for row in order]),
        facts={"current_version": 0},
    )
    write_tokens(folder, [record])
    return folder


def weight(name: str, row: int, log: float) -> float:
    """What a token's gradient is multiplied by."""
    return {
        "reference": math.exp(sum(LOGS[row])),
        "none": 1.0,
        "token": min(math.exp(log), 1.1),
        "filter": float(0.8 <= math.exp(log) <= 1.25),
    }[name]


def looped(model_folder: Path) -> dict[str, Tensor]:
    """By name, float64 ``[prompts, parameters]``: gradients of the prompts' weighted log-probs, token by
    token."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    parameters = list(model.parameters())
    found = {name: [torch.zeros(0)] * 3 for name in ("reference", *CONFIGS)}
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].double()
        for place, (token, log) in enumerate(zip(response, LOGS[row], strict=True)):
            log_prob = logits[len(prompt) - 1 + place].log_softmax(-1)[token]
            parts = torch.autograd.grad(log_prob, parameters, retain_graph=True)
            gradient = ADVANTAGES[row] * torch.cat([part.flatten() for part in parts])
            for name, prompts in found.items():
                added, own = weight(name, row, log) * gradient, OF_PROMPT[row]
                prompts[own] = prompts[own] + added if len(prompts[own]) else added
    return {name: torch.stack(prompts) for name, prompts in found.items()}


def expected(prompts: dict[str, Tensor], name: str) -> dict[str, float]:
    """The numbers by their definitions, pair by pair."""

    def over_pairs(values: Tensor) -> float:
        pairs = list(itertools.permutations(range(3), 2))
        return sum(float(values[i] @ values[j]) for i, j in pairs) / len(pairs)

    whole = {key: values.sum(dim=0) for key, values in prompts.items()}
    used, plain, reference = whole[name], whole["none"], whole["reference"]
    bias, signal = over_pairs(prompts[name] - prompts["reference"]), over_pairs(prompts["reference"])
    spread = sum(float(one @ one) for one in prompts[name]) / 3 - over_pairs(prompts[name])
    return {
        "norm": float(used.norm() / plain.norm()),
        "cosine": float(used @ plain / used.norm() / plain.norm()),
        "cosine_to_reference": float(used @ reference / used.norm() / reference.norm()),
        "bias": math.copysign(math.sqrt(abs(bias / signal)), bias) if signal > 0 else math.nan,
        "noise": math.sqrt(max(spread, 0.0) / 3 / signal) if signal > 0 else math.nan,
    }


def said(one: Estimate) -> dict[str, float]:
    names = ("norm", "cosine", "cosine_to_reference", "bias", "noise")
    return {name: one.columns[name].value for name in names}


def test_numbers_of_presets_are_those_of_a_loop_over_tokens(run: Path, model_folder: Path) -> None:
    gradients = ParameterGradients(run, projected=1_000_000)
    prompts = looped(model_folder)
    assert (
        sum(float(prompts["reference"][i] @ prompts["reference"][j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0
    )
    for one in estimate_presets(gradients.batch, CONFIGS, draws=20, updates=gradients):
        assert said(one) == pytest.approx(expected(prompts, one.name), rel=1e-4, abs=1e-5), one.name
    assert "12 backward passes" in gradients.cost  # of three prompts for the reference and three presets


def test_a_projection_keeps_norms_and_angles(run: Path) -> None:
    exact, projected = ParameterGradients(run, projected=1_000_000), ParameterGradients(run)
    pairs = zip(
        estimate_presets(exact.batch, CONFIGS, draws=20, updates=exact),
        estimate_presets(exact.batch, CONFIGS, draws=20, updates=projected),
        strict=True,
    )
    for one, other in pairs:
        for name in ("norm", "cosine", "cosine_to_reference"):
            assert said(other)[name] == pytest.approx(said(one)[name], abs=0.02), (one.name, name)
    assert "a random projection to 16,384 numbers" in projected.cost
    assert "projection" not in exact.cost


def test_a_projection_has_signs_so_that_numbers_alike_do_not_add_up(run: Path) -> None:
    projected = ParameterGradients(run)._project({"one": torch.ones(60_000), "other": torch.ones(20_000)})
    assert float(projected @ projected) == pytest.approx(80_000, rel=0.05)


def test_the_command_says_whose_gradients_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["what-if", str(run), "--presets", "disabled,decoupled_token_is"]
    assert main([*command, "--gradients", "--json"]) == 0
    real = json.loads(capsys.readouterr().out)
    assert any("the weights before steps 1: " in note for note in real["notes"])
    assert real["presets"]["disabled"]["norm"]["value"] == 1.0
    assert main([*command, "--json"]) == 0
    proxy = json.loads(capsys.readouterr().out)
    assert not any("backward" in note for note in proxy["notes"])
    assert proxy["presets"]["decoupled_token_is"]["cosine"] != real["presets"]["decoupled_token_is"]["cosine"]


def test_records_without_their_weights_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "tokens").glob("*.parquet"):
        path.unlink()
    write_tokens(run, [token_record(2)])
    with pytest.raises(NothingToReplayError, match=r"trainer\.save_freq"):
        ParameterGradients(run)
    assert main(["what-if", str(run), "--gradients"]) == 2
    assert "trainer.save_freq" in capsys.readouterr().err
