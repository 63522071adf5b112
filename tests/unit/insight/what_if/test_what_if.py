"""What presets would have done: right on policies whose gradients are enumerated, refused where a fault is
named."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import exactness
import numpy as np
import pytest
import torch
from planted_series import COOLER, SIGNS, healthy, write_run
from recorded_tokens import token_record, write_tokens

from verl_rc.cli import main
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig
from verl_rc.data.token_parquet import record_path
from verl_rc.data.token_record import FOLDER
from verl_rc.insight.verdict import Verdict
from verl_rc.insight.what_if import (
    NoRecordsError,
    RecordedBatch,
    Updates,
    clip_of,
    estimate_presets,
    read_batch,
    try_presets,
)
from verl_rc.insight.what_if.estimate import coefficients, reference_level, uncapped
from verl_rc.insight.what_if.trial import recommend

TRIED = (
    "no correction",
    "token weights, at most 2",
    "prefix weights, at most 2",
    "sequence weights",
    "sequence weights, at most 2",
    "geometric weights, at most 1.2",
    "token_k1 0.5 to 1.5",
    "seq_mean_k1 0.7 to 1.2",
)
METHODS = {method.name: method for method in exactness.METHODS if method.name in TRIED}
CONFIGS = {
    name: RolloutCorrectionConfig.model_validate(dict(method.config)) for name, method in METHODS.items()
}


@dataclass(frozen=True)
class Enumerated:
    """A tabular policy all of whose responses are enumerated."""

    problem: exactness.Problem
    train: torch.Tensor
    """float64 ``[responses, T]``, as ``rollout``: log-probs."""
    rollout: torch.Tensor
    gradients: torch.Tensor
    """float64 ``[responses, T, D]``: of each log-prob of ``train`` for all logits."""
    findings: Mapping[str, exactness.Finding]
    """By method, the exact bias and variance of its update."""


@cache
def enumerated(seed: int, gap: float) -> Enumerated:
    problem = exactness.make_problem(seed, gap)
    logits = torch.tensor(problem.logits, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: exactness.log_probs_of(problem, x), logits, vectorize=True
    )
    advantages = exactness.outcome_advantages(problem)
    return Enumerated(
        problem,
        exactness.log_probs_of(problem, logits),
        exactness.log_probs_of(problem, torch.tensor(problem.rollout_logits, dtype=torch.float64)),
        jacobian.flatten(start_dim=2),
        {name: exactness.examine(problem, method, advantages) for name, method in METHODS.items()},
    )


def sampled(policy: Enumerated, rows: int, seed: int) -> tuple[RecordedBatch, Updates]:
    """Responses sampled from the rollout policy, each with its own prompt, and what computes updates of all
    logits."""
    problem = policy.problem
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(
        exactness.rollout_probabilities(problem), rows, replacement=True, generator=generator
    )
    advantages = exactness.padded_rows(exactness.outcome_advantages(problem))
    mask = exactness.response_mask(problem)[drawn]
    gradients = policy.gradients[drawn]
    batch = RecordedBatch(
        train=policy.train[drawn].float(),
        rollout=policy.rollout[drawn].float(),
        mask=mask,
        advantages=advantages[drawn].float(),
        scores=torch.tensor([response.score for response in problem.responses])[drawn],
        prompts=torch.arange(rows),
        gradients=gradients.square().sum(dim=-1),
        directions=torch.zeros_like(mask, dtype=torch.int64),
    )

    def updates(
        _: RecordedBatch, token_coefficients: Sequence[torch.Tensor], blocks: torch.Tensor, count: int
    ) -> list[torch.Tensor]:
        zeros = torch.zeros(count, gradients.shape[-1], dtype=torch.float64)
        return [
            zeros.index_add(0, blocks, torch.einsum("bt,btd->bd", coefficient, gradients))
            for coefficient in token_coefficients
        ]

    return batch, updates


def true_error(policy: Enumerated, name: str, batch_size: int) -> float:
    """Mean squared error of the update of so many responses, relative to the mean square of one with exact
    weights."""
    finding, exact = policy.findings[name], policy.findings["sequence weights"]
    return (finding.bias**2 + finding.variance / batch_size) / (1 + exact.variance)


@pytest.mark.parametrize(
    ("rows", "batch_size"), [(1024, 64), (64, 64), pytest.param(1024, 1024, marks=pytest.mark.slow)]
)
def test_the_recommended_preset_is_right_on_enumerated_policies(rows: int, batch_size: int) -> None:
    right = 0
    for seed in range(12):
        policy = enumerated(seed, gap=(0.1, 0.3, 0.5, 0.8)[seed % 4])
        batch, updates = sampled(policy, rows, seed)
        estimates = estimate_presets(batch, CONFIGS, batch_size, draws=200, updates=updates)
        recommended, _ = recommend(estimates)
        assert recommended is not None
        errors = {name: true_error(policy, name, batch_size) for name in CONFIGS}
        best = min(errors, key=lambda name: errors[name])
        interval = next(estimate.columns["error"] for estimate in estimates if estimate.name == best)
        right += errors[recommended] <= max(errors[best], interval.high)
    assert right >= 11


def test_errors_and_biases_are_those_of_the_enumeration() -> None:
    policy = enumerated(2, gap=0.5)
    batch, updates = sampled(policy, 12_000, 0)
    for estimate in estimate_presets(batch, CONFIGS, batch_size=64, draws=200, updates=updates):
        name, columns = estimate.name, estimate.columns
        finding = policy.findings[name]
        spread = columns["bias"].high - columns["bias"].low  # of 90 %: 3.3 standard errors
        assert abs(columns["bias"].value - finding.bias) <= max(1.3 * spread, 0.02), (
            name,
            columns["bias"],
            finding.bias,
        )
        assert columns["bias"].value == pytest.approx(finding.bias, abs=0.2), name
        assert columns["error"].value == pytest.approx(true_error(policy, name, 64), rel=0.35), name
        assert columns["noise"].value == pytest.approx(math.sqrt(finding.variance / 64), rel=0.1), name


def test_intervals_cover_the_true_share_of_rejected_tokens() -> None:
    policy = enumerated(1, gap=0.6)
    name = "token_k1 0.5 to 1.5"
    truth = 1 - policy.findings[name].used
    covered = 0
    for seed in range(40):
        batch, _ = sampled(policy, 96, seed)
        (estimate,) = estimate_presets(batch, {name: CONFIGS[name]}, draws=200)
        covered += (
            estimate.columns["rejected_tokens"].low <= truth <= estimate.columns["rejected_tokens"].high
        )
    assert 0.8 <= covered / 40 <= 0.98


# ---- Coefficients.


def small_batch(logs: list[list[float]], advantages: list[list[float]] | None = None) -> RecordedBatch:
    """Rows of a token each id, with these log-ratios."""
    ratio = torch.tensor(logs)
    rollout = torch.full_like(ratio, -1.5)
    return RecordedBatch(
        train=rollout + ratio,
        rollout=rollout,
        mask=torch.ones_like(ratio, dtype=torch.bool),
        advantages=torch.ones_like(ratio) if advantages is None else torch.tensor(advantages),
        scores=torch.zeros(len(ratio)),
        prompts=torch.arange(len(ratio)),
        gradients=torch.ones_like(ratio, dtype=torch.float64),
        directions=torch.zeros_like(ratio, dtype=torch.int64),
    )


LOGS = [[math.log(0.5), math.log(3.0)], [math.log(1.1), 0.0]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [[1.0, 1.0], [1.0, 1.0]]),
        ({"rollout_is": "token"}, [[0.5, 2.0], [1.1, 1.0]]),
        ({"rollout_is": "sequence"}, [[1.5, 1.5], [1.1, 1.1]]),
        ({"rollout_is": "token", "rollout_is_threshold": "0.6_2.0"}, [[0.0, 0.0], [1.1, 1.0]]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_2.0"}, [[0.0, 0.0], [1.0, 1.0]]),
        ({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}, [[0.5, 2.0], [1.1, 1.0]]),
        ({"bypass_mode": True, "loss_type": "ppo_clip"}, [[0.5, 0.0], [1.1, 1.0]]),
    ],
)
def test_what_gradients_are_multiplied_by(fields: dict[str, Any], expected: list[list[float]]) -> None:
    found = coefficients(small_batch(LOGS), RolloutCorrectionConfig.model_validate(fields))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_a_turn_is_weighed_and_rejected_as_one_action() -> None:
    """A turn of ratios 0.5 and 3, an environment's token, a turn of ratio 0.25."""
    batch = small_batch([[math.log(0.5), math.log(3.0), 0.0, math.log(0.25)]])
    batch = replace(batch, mask=torch.tensor([[True, True, False, True]]))
    weighed = coefficients(batch, RolloutCorrectionConfig(rollout_is="turn"))
    expected = torch.tensor([[1.5, 1.5, 0.0, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(weighed * batch.mask, expected, rtol=1e-6, atol=1e-6)
    bounds = {"rollout_rs": "turn_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    rejected = coefficients(batch, RolloutCorrectionConfig.model_validate(bounds))
    assert rejected.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_weights_by_turn_are_tried_where_records_tell_turns_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = np.tile([True] * 4 + [False] * 2 + [True] * 4, 16)
    run = recorded_run(tmp_path, response_mask=mask)
    assert main(["what-if", str(run), "--json"]) == 0
    assert "rollout_is=turn" in json.loads(capsys.readouterr().out)["presets"]
    given = ["--set", "rollout_rs=turn_sum_k1", "--set", "rollout_rs_threshold=0.5_2.0"]
    assert main(["what-if", str(run), "--presets", "disabled", *given]) == 0
    assert "rollout_is=turn" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "fields", [{"rollout_is": "turn"}, {"rollout_rs": "turn_mean_k1", "rollout_rs_threshold": "0.5_2.0"}]
)
def test_turns_are_not_corrected_where_records_do_not_tell_them_apart(fields: dict[str, Any]) -> None:
    given = {"given": RolloutCorrectionConfig.model_validate(fields)}
    with pytest.raises(ValueError, match="given: to correct turns some row must have several"):
        try_presets(small_batch(LOGS), given)


def test_the_clip_of_negative_advantages_has_another_side() -> None:
    batch = small_batch(
        [[math.log(0.5), math.log(2.9)], [math.log(1.1), math.log(3.1)]], [[-1.0, -1.0], [-1.0, -1.0]]
    )
    config = RolloutCorrectionConfig.model_validate({"bypass_mode": True, "loss_type": "ppo_clip"})
    found = coefficients(batch, config)
    torch.testing.assert_close(
        found, torch.tensor([[0.0, 2.9], [1.1, 0.0]], dtype=torch.float64), rtol=1e-5, atol=1e-6
    )


def test_topr_tapers_rows_of_negative_advantages() -> None:
    """Rows of ratios 0.5 and 3, and of 0.5 and 1.2: products of 1.5, held at 1, and 0.6."""
    logs = [[math.log(0.5), math.log(3.0)], [math.log(0.5), math.log(1.2)]]
    config = RolloutCorrectionConfig.from_preset("topr")
    for sign, expected in ((1.0, [[1.0, 1.0], [1.0, 1.0]]), (-1.0, [[1.0, 1.0], [0.6, 0.6]])):
        found = coefficients(small_batch(logs, [[sign, sign]] * 2), config)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_the_clip_is_that_of_the_run() -> None:
    """A ratio of 1.25 is clipped by 0.2 and not by 0.28; 2.9 and 0.75 of negative advantages likewise."""
    logs = [[math.log(1.25), math.log(2.9)], [math.log(0.75), 0.0]]
    batch = small_batch(logs, [[1.0, -1.0], [-1.0, 1.0]])
    config = RolloutCorrectionConfig.model_validate({"bypass_mode": True, "loss_type": "ppo_clip"})
    for settings, expected in (
        ({}, [[0.0, 2.9], [0.0, 1.0]]),
        ({"clip_ratio_high": 0.28}, [[1.25, 2.9], [0.0, 1.0]]),
        ({"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_c": 2.0}, [[1.25, 0.0], [0.75, 1.0]]),
        ({"clip_ratio": "no number"}, [[0.0, 2.9], [0.0, 1.0]]),
    ):
        clip = clip_of({f"actor_rollout_ref.actor.{name}": value for name, value in settings.items()})
        found = coefficients(replace(batch, clip=clip), config)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_the_clip_comes_from_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path)
    configuration = run / "resolved_config.yaml"
    configuration.unlink(missing_ok=True)
    assert main(["what-if", str(run), "--presets", "bypass_ppo_clip"]) == 0
    assert "clipped to 0.8 to 1.2, the default: the run's files do not say." in capsys.readouterr().out
    configuration.write_text("actor_rollout_ref: {actor: {clip_ratio_low: 0.1, clip_ratio_high: 0.28}}")
    assert main(["what-if", str(run), "--presets", "bypass_ppo_clip"]) == 0
    assert "clipped to 0.9 to 1.28 as in the run." in capsys.readouterr().out


def test_columns_by_hand() -> None:
    batch = small_batch(LOGS, [[1.0, 1.0], [-1.0, -1.0]])
    rule = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_5.0"}
    (one,) = estimate_presets(batch, {"x": RolloutCorrectionConfig.model_validate(rule)}, draws=10)
    used = [0.0, 2.0, 1.1, 1.0]
    columns = {name: column.value for name, column in one.columns.items()}
    assert columns["rejected_tokens"] == pytest.approx(1 / 4)
    assert columns["rejected_rows"] == 0.0
    assert columns["rejected_negative"] == 0.0
    assert columns["ess_tokens"] == pytest.approx(sum(used) ** 2 / (3 * sum(c * c for c in used)), rel=1e-6)
    assert columns["clipped"] == pytest.approx(1.0 / 5.1, rel=1e-6)
    assert columns["norm"] == pytest.approx(math.sqrt(sum(c * c for c in used) / 4), rel=1e-6)
    assert columns["cosine"] == pytest.approx(sum(used) / math.sqrt(4 * sum(c * c for c in used)), rel=1e-6)


def test_heavy_tails_take_token_weights_as_their_reference() -> None:
    assert reference_level(small_batch([[0.01] * 8] * 4)) == "sequence"
    assert reference_level(small_batch([[0.0] * 40] * 3 + [[0.3] * 40])) == "token"
    assert float(uncapped(small_batch([[2.0, 2.0]]), "sequence")[0, 0]) == pytest.approx(
        math.exp(4.0), rel=1e-5
    )


# ---- From records.


def recorded_run(folder: Path, metrics: dict[str, list[float]] | None = None, **changed: Any) -> Path:
    run = write_run(folder / "run", {**healthy(20), **(metrics or {})})
    generator = np.random.default_rng(3)
    records = []
    for step in range(1, 6):
        rollout = -generator.exponential(1.0, 160)
        old = np.minimum(rollout + 0.02 * generator.standard_normal(160), 0.0)
        columns = {
            "chosen_by": ["random"] * 16,
            "advantage": np.repeat(generator.choice([-1.0, 1.0], 16), 10).astype("float32"),
        }
        columns |= {
            "response_ids": generator.integers(1, 11, 160),
            "rollout_log_prob": rollout,
            "old_log_prob": old,
        }
        records.append(token_record(step, [10] * 16, **{**columns, **changed}))
    write_tokens(run, records)
    return run


def test_random_rows_of_all_records_are_one_batch(tmp_path: Path) -> None:
    write_tokens(tmp_path, [token_record(1), token_record(2, (1, 5, 3))])
    batch = read_batch(tmp_path)
    assert batch.mask.sum(dim=-1).tolist() == [4, 2, 1, 5]
    assert batch.num_prompts == 2  # rows 0 and 1 share a prompt in each step
    assert batch.gradients[0, :4].tolist() == pytest.approx([0.25] * 4, rel=1e-6)
    assert read_batch(tmp_path, first_step=2).mask.shape == (2, 5)


def test_records_that_are_left_out_are_named(tmp_path: Path) -> None:
    """One lacks advantages, one is damaged."""
    write_tokens(tmp_path, [token_record(1), token_record(2, advantage=None), token_record(3)])
    record_path(tmp_path / FOLDER, 3).write_bytes(b"PAR1")
    batch = read_batch(tmp_path)
    assert batch.step_of_row == [1, 1]
    damaged, lacking = batch.notes
    assert damaged.startswith("1 token record(s) cannot be read and are left out: step 3")
    assert lacking == "1 token record(s) lack old_log_prob or advantage and are left out."
    assert set(batch.notes) <= set(try_presets(batch, {"disabled": RolloutCorrectionConfig()}).notes)


def test_runs_without_usable_records_are_refused_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(NoRecordsError, match=r"trainer\.token_records\.enable=True"):
        read_batch(tmp_path)
    write_tokens(tmp_path, [token_record(1, old_log_prob=None)])
    with pytest.raises(NoRecordsError, match="bypass_mode=False"):
        read_batch(tmp_path)


def test_a_healthy_gap_needs_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path)
    assert (
        main(["what-if", str(run), "--presets", "disabled,decoupled_token_is,decoupled_seq_is", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] == "disabled"
    assert found["presets"].keys() == {"disabled", "decoupled_token_is", "decoupled_seq_is"}
    assert (
        main(
            [
                "what-if",
                str(run),
                "--set",
                "rollout_is=token",
                "--set",
                "rollout_is_threshold=1.5",
                "--steps",
                "1-3",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS if PRESETS[name].origin.startswith("verl since"))
    assert "given" in out
    assert "48 random rows of 24 prompts" in out
    assert "Too few prompts" in out


def test_the_simplest_of_equals_is_chosen() -> None:
    batch = small_batch([[0.0] * 3] * 6, [[1.0, -1.0, 1.0]] * 6)
    configs = {name: RolloutCorrectionConfig.from_preset(name) for name in PRESETS}
    found = try_presets(batch, configs)
    assert found.recommended == "disabled"
    corrections = [estimate for estimate in found.estimates if estimate.config.effective_fields()]
    recommended, _ = recommend(corrections)
    assert recommended is not None
    assert configs[recommended].rollout_is == "token"


def test_no_preset_is_chosen_where_a_fault_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cooler = {f"rollout_corr/{name}": [value] * 20 for name, value in {**SIGNS, **COOLER}.items()}
    assert main(["what-if", str(recorded_run(tmp_path, cooler))]) == 0
    out = capsys.readouterr().out
    assert "no preset is recommended" in out
    assert "temperature: no preset repairs this." in out


@pytest.mark.parametrize(
    ("logs", "advantages"),
    [([[0.1, -0.2]], [[1.0, 1.0]]), ([[0.1, -0.2]] * 3, [[0.0, 0.0]] * 3)],
    ids=["one prompt", "advantages of 0"],
)
def test_nothing_is_recommended_where_errors_cannot_be_told(
    logs: list[list[float]], advantages: list[list[float]]
) -> None:
    found = try_presets(small_batch(logs, advantages), CONFIGS)
    assert found.recommended is None
    assert found.reasons == (
        "Errors cannot be told: they need two prompts or more, and advantages that are not 0.",
    )


@pytest.mark.parametrize(
    ("cause", "refused"),
    [
        ("temperature", True),
        ("few tokens are others than sampled", True),
        ("weights never arrive", True),
        ("staleness", False),
        ("grown, cause not separable by metrics", False),
    ],
)
def test_causes_that_no_preset_repairs(cause: str, refused: bool) -> None:
    said = SimpleNamespace(topic="gap", level="fault", cause=cause, next_test="")
    verdict = cast(Verdict, SimpleNamespace(statements=(said,)))
    found = try_presets(small_batch([[0.01, -0.02]] * 6), {"disabled": CONFIGS["no correction"]}, verdict)
    assert (found.recommended is None) == refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "ghost"], "ghost"),
        (["--set", "rollout_is=ghost"], "rollout_is"),
        (["--set", "nothing"], "KEY=VALUE"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["what-if", str(recorded_run(tmp_path)), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
