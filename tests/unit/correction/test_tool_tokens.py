"""Tool tokens between turns change nothing: the same response without them gives the same weights, rejections
and metrics."""

import math
import re

import pytest
import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction, measure

PLAN = ["ttt...tttt", "tttttttttt", ".tt.t.....", "tttt.ttt.."]
"""``t``: a token of the policy's, ``.``: of a tool, or padding."""


def packed(values: Tensor, mask: Tensor, padding: float = 0.0) -> Tensor:
    """The tokens of the policy, moved to the left."""
    rows = [
        [value for value, counts in zip(row, there, strict=True) if counts]
        for row, there in zip(values, mask, strict=True)
    ]
    return torch.tensor([row + [padding] * (values.shape[1] - len(row)) for row in rows], dtype=values.dtype)


def presets() -> dict[str, RolloutCorrectionConfig]:
    """Every level of weights and every scope of rules, one choice each."""
    names = (
        "decoupled_token_is",
        "decoupled_seq_is_rs",
        "decoupled_geo_rs",
        "decoupled_k3_rs_seq_tis",
        "decoupled_token_icepop",
    )
    prefix = RolloutCorrectionConfig(
        rollout_is="prefix", rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.6_1.8,0.2"
    )
    return {**{name: RolloutCorrectionConfig.from_preset(name) for name in names}, "prefix": prefix}


@pytest.mark.parametrize("name", list(presets()))
def test_same_as_without_tool_tokens(name: str) -> None:
    mask = torch.tensor([[symbol == "t" for symbol in row] for row in PLAN])
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(mask.shape, generator=generator)
    train = rollout + 0.4 * torch.randn(mask.shape, generator=generator)
    train[~mask], rollout[~mask] = -50.0, 0.0  # the trainer knows tool tokens too, and finds them unlikely
    config = presets()[name].model_copy(update={"diagnostics": "full"})
    versions = torch.where(mask, 5, -1)
    there = compute_rollout_correction(train, rollout, mask, config, policy_versions=versions)
    lengths = mask.sum(dim=-1, keepdim=True)
    dense = torch.arange(mask.shape[1]) < lengths
    alone = compute_rollout_correction(
        packed(train, mask), packed(rollout, mask), dense, config, policy_versions=torch.where(dense, 5, -1)
    )
    if there.weights is not None and alone.weights is not None:
        torch.testing.assert_close(packed(there.weights, mask), torch.where(dense, alone.weights, 0.0))
    assert torch.equal(packed(there.keep_mask & mask, mask), alone.keep_mask & dense)
    mine, theirs = there.metrics(), alone.metrics()
    shared = {name for name in mine if "turn" not in name}
    assert {name: mine[name] for name in shared} == pytest.approx(
        {name: theirs[name] for name in shared}, nan_ok=True
    )


def test_the_gap_by_turn_against_a_loop_and_merged_from_parts() -> None:
    plan = [*PLAN, "t.t.t.t.tt"]
    mask = torch.tensor([[symbol == "t" for symbol in row] for row in plan])
    generator = torch.Generator().manual_seed(5)
    rollout = -torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    train = rollout + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    config = RolloutCorrectionConfig(diagnostics="full")
    by_turn: dict[int, list[float]] = {}
    for row, symbols in enumerate(plan):
        runs = [part for part in symbols.split(".") if part]
        ratios = iter((train - rollout)[row][mask[row]].tolist())
        for turn, part in enumerate(runs):
            by_turn.setdefault(turn, []).extend(next(ratios) for _ in part)
    metrics = compute_rollout_correction(train, rollout, mask, config).metrics()
    for turn, ratios in by_turn.items():
        k3 = sum(math.exp(value) - value - 1 for value in ratios) / len(ratios)
        assert metrics[f"rollout_corr/turn_{turn}_k3_kl"] == pytest.approx(k3)
    assert sorted(by_turn) == [0, 1, 2, 3, 4]
    parts = [measure(train[rows], rollout[rows], mask[rows], config) for rows in (slice(0, 2), slice(2, 5))]
    merged = parts[0].merge(parts[1]).metrics(config)
    assert {name: value for name, value in merged.items() if "/turn_" in name} == pytest.approx(
        {name: value for name, value in metrics.items() if "/turn_" in name}
    )


def test_later_turns_share_the_last_bucket_and_one_turn_alone_is_not_split() -> None:
    config, rollout = RolloutCorrectionConfig(diagnostics="full"), torch.full((1, 13), -1.0)
    mask = torch.tensor([[index % 2 == 0 for index in range(13)]])  # seven turns of a token each
    train = rollout.double()
    train[0, 8] += 0.3  # the fifth turn
    metrics = compute_rollout_correction(train, rollout, mask, config).metrics()
    assert metrics["rollout_corr/turn_4_k3_kl"] == pytest.approx((math.exp(0.3) - 1.3) / 3)
    assert "rollout_corr/turn_5_k3_kl" not in metrics
    dense = compute_rollout_correction(rollout, rollout, torch.ones_like(mask), config).metrics()
    assert not [name for name in dense if "/turn_" in name]


TURNS = ["tt..ttt.t", "t.t......", "ttttt....", "..tt.tttt"]


def turn_batch(broken: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of train and rollout, float64, and the mask of ``TURNS``; ``broken``: one is not finite."""
    mask = torch.tensor([[symbol == "t" for symbol in row] for row in TURNS])
    generator = torch.Generator().manual_seed(11)
    rollout = -torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    train = rollout + 0.4 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    train[~mask], rollout[~mask] = -50.0, torch.nan
    if broken:
        rollout[0, 5] = -torch.inf
    return train, rollout, mask


def spans_of(row: str) -> list[slice]:
    return [slice(*found.span()) for found in re.finditer("t+", row)]


@pytest.mark.parametrize("nonfinite", ["neutral", "reject_token"])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("threshold", [1.2, "0.8_1.2"])
def test_a_turn_is_treated_as_a_sequence_of_its_own(
    threshold: float | str, broken: bool, nonfinite: str
) -> None:
    """Weights and rejection of turns are those of sequences where every turn is a row."""
    train, rollout, mask = turn_batch(broken)
    shared = {"rollout_is_threshold": threshold, "rollout_rs_threshold": 1.5, "nonfinite_logprob": nonfinite}
    for rule in ("sum_k1", "mean_k1"):
        whole = compute_rollout_correction(
            train, rollout, mask, {"rollout_is": "turn", "rollout_rs": f"turn_{rule}", **shared}
        )
        rejected = 0
        for row, symbols in enumerate(TURNS):
            for span in spans_of(symbols):
                alone = compute_rollout_correction(
                    train[row : row + 1, span],
                    rollout[row : row + 1, span],
                    mask[row : row + 1, span],
                    {"rollout_is": "sequence", "rollout_rs": f"seq_{rule}", **shared},
                )
                assert whole.weights is not None
                assert alone.weights is not None
                torch.testing.assert_close(whole.weights[row, span], alone.weights[0])
                assert torch.equal(whole.keep_mask[row, span], alone.keep_mask[0])
                rejected += not alone.keep_mask.all()
        assert 0 < rejected < 8
        assert not whole.weights[~mask].any()


def test_a_rule_on_turns_counts_each_token_with_its_turn() -> None:
    train, rollout, mask = turn_batch(broken=False)
    config = RolloutCorrectionConfig(rollout_rs="turn_sum_k1", rollout_rs_threshold=1.5, diagnostics="full")
    metrics = compute_rollout_correction(train, rollout, mask, config).metrics()
    turns = [
        (train - rollout)[row, span].tolist()
        for row, symbols in enumerate(TURNS)
        for span in spans_of(symbols)
    ]
    outside = [turn for turn in turns if abs(sum(turn)) > math.log(1.5)]
    share = sum(map(len, outside)) / sum(map(len, turns))
    assert metrics["rollout_corr/rollout_rs_turn_sum_k1_masked_fraction"] == pytest.approx(share)
    mean = -sum(len(turn) * sum(turn) for turn in turns) / sum(map(len, turns))
    assert metrics["rollout_corr/rollout_rs_turn_sum_k1_mean"] == pytest.approx(mean)
