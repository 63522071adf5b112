"""Tool tokens between turns change nothing: the same response without them gives the same weights, rejections
and metrics."""

import math
import random
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
        assert metrics[f"rollout_corr/turn_{turn}_token_fraction"] == pytest.approx(
            len(ratios) / int(mask.sum())
        )
        assert metrics[f"rollout_corr/turn_{turn}_kl"] == pytest.approx(-sum(ratios) / len(ratios))
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
    metrics = compute_rollout_correction(rollout, rollout, mask, config).metrics()
    assert metrics["rollout_corr/turn_4_token_fraction"] == pytest.approx(3 / 7)
    assert "rollout_corr/turn_5_kl" not in metrics
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


def effective(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight * weight for weight in weights))


def test_effective_sample_sizes_of_whole_episodes_by_their_turns() -> None:
    """Against a loop, merged from parts, whatever weights are applied; nothing where there is one turn."""
    source = random.Random(5)
    plan = ["".join("t" * source.randint(1, 3) + "." for _ in range(source.randint(1, 7))) for _ in range(60)]
    width = max(map(len, plan))
    mask = torch.tensor([[symbol == "t" for symbol in row.ljust(width, ".")] for row in plan])
    generator = torch.Generator().manual_seed(7)
    rollout = -torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    train = rollout + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    products: dict[str, list[float]] = {}
    for row, symbols in enumerate(plan):
        turns = symbols.count("t.")
        name = str(turns) if turns <= 2 else "3_to_4" if turns <= 4 else "5_up"
        products.setdefault(name, []).append(math.exp((train - rollout)[row][mask[row]].sum()))
    expected = {f"rollout_corr/ess_turns_{name}": effective(weights) for name, weights in products.items()}
    assert len(expected) == 4
    for level in (None, "turn"):
        config = RolloutCorrectionConfig(rollout_is=level, diagnostics="full")
        parts = [
            measure(train[rows], rollout[rows], mask[rows], config) for rows in (slice(0, 7), slice(7, 60))
        ]
        metrics = parts[0].merge(parts[1]).metrics(config)
        assert {name: value for name, value in metrics.items() if "ess_turns" in name} == pytest.approx(
            expected
        )
    dense = compute_rollout_correction(train, rollout, torch.ones_like(mask), config).metrics()
    assert not [name for name in dense if "ess_turns" in name]
