"""Weights, masks and full diagnostics against plain loops over tokens in Python floats, written
independently."""

import functools
import itertools
import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from verl_rc.config.rollout_correction import REJECTION_RULES, WEIGHT_LEVELS, RolloutCorrectionConfig
from verl_rc.correction import (
    CorrectionStatistics,
    SequenceContext,
    compute_rollout_correction,
    correct_sequences,
    measure,
)

SAFE = 20.0
BOUNDS = {"k1": (0.7, 1.6), "k2": 0.08, "k3": 0.08, "tv": 0.05, "bkl": 0.02, "kpop": 0.03}
ROW_BOUNDS = {
    "turn_sum": {"k1": (0.6, 1.7)},
    "turn_mean": {"k1": (0.8, 1.3)},
    "seq_sum": {"k1": (0.5, 1.8), "k2": 0.3, "k3": 0.3},
    "seq_mean": {"k1": (0.9, 1.2), "k2": 0.06, "k3": 0.06},
}


@dataclass
class Row:
    """One sequence: log-ratios of its tokens, and facts about it."""

    ratios: dict[int, float]
    train: dict[int, float]
    positive: dict[int, bool]
    correct: bool
    group: str
    causes: dict[int, set[str]] = field(default_factory=dict)


def clip(value: float) -> float:
    return max(-SAFE, min(SAFE, value))


def statistic(kind: str, value: float) -> float:
    bounded = clip(value)
    return {"k1": -bounded, "k2": bounded * bounded / 2, "k3": math.exp(bounded) - 1 - bounded}[kind]


def coins_kl(first: float, second: float) -> float:
    return sum(a * math.log(a / b) for a, b in ((first, second), (1 - first, 1 - second)))


def probability_statistic(kind: str, train: float, ratio: float) -> float:
    p, q = (min(max(math.exp(x), 1e-8), 1 - 1e-8) for x in (train, train - ratio))
    return {"tv": abs(p - q), "bkl": coins_kl(q, p), "kpop": max(coins_kl(p, q), coins_kl(q, p))}[kind]


def threshold_of(rule: str) -> tuple[float, float] | float:
    scope, kind = rule.rsplit("_", 1)
    return ROW_BOUNDS.get(scope, BOUNDS)[kind]


def is_within(rule: str, value: float) -> bool:
    bound = threshold_of(rule)
    if isinstance(bound, tuple):
        return bound[0] <= math.exp(-value) <= bound[1]
    return value <= bound


def rejected_by(rule: str, row: Row) -> set[int]:
    """Positions of the row that the rule rejects."""
    scope, kind = rule.rsplit("_", 1)
    if kind.startswith("k") and kind != "kpop":
        values = {t: statistic(kind, ratio) for t, ratio in row.ratios.items()}
    else:
        values = {t: probability_statistic(kind, row.train[t], ratio) for t, ratio in row.ratios.items()}
    if not values:
        return set()
    if scope == "token":
        return {t for t, value in values.items() if not is_within(rule, value)}
    if scope.startswith("turn"):
        combine = {"turn_sum": sum, "turn_mean": statistics.fmean}[scope]
        turns = turns_of(row)
        return {t for turn in turns if not is_within(rule, combine(values[t] for t in turn)) for t in turn}
    total = {"seq_sum": sum, "seq_mean": statistics.fmean, "seq_max": max}[scope](values.values())
    return set() if is_within(rule, total) else set(values)


def turns_of(row: Row) -> list[list[int]]:
    """The positions of each run of tokens."""
    turns = list[list[int]]()
    for t in sorted(row.ratios):
        if t - 1 in row.ratios:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def raw_weight(level: str, row: Row, position: int) -> float:
    if level == "token":
        logs = row.ratios[position]
    elif level == "prefix":
        logs = sum(ratio for t, ratio in row.ratios.items() if t <= position)
    elif level == "turn":
        logs = sum(row.ratios[t] for turn in turns_of(row) if position in turn for t in turn)
    elif level == "sequence":
        logs = sum(row.ratios.values())
    else:
        logs = statistics.fmean(row.ratios.values())
    return math.exp(clip(logs))


def applied(weight: float, threshold: float | str) -> float:
    if isinstance(threshold, str):
        lower, upper = map(float, threshold.split("_"))
        return weight if lower <= weight <= upper else 0.0
    return min(weight, threshold)


UNREAD = (math.nan, -math.inf, math.inf, 0.0, -3.0)
"""What stands at masked positions."""


def make(
    seed: int, rows: int = 9, width: int = 20, scales: tuple[float, ...] = (0.05, 0.3, 0.6)
) -> tuple[list[Row], dict[str, Any]]:
    """Random rows with holes in their masks, some of them empty, and the same as tensors; ``scales`` of the
    log-ratios."""
    source = random.Random(seed)
    made = []
    train, rollout = ([[source.choice(UNREAD) for _ in range(width)] for _ in range(rows)] for _ in range(2))
    advantages, mask = ([[0.0] * width for _ in range(rows)] for _ in range(2))
    for i in range(rows):
        positions = [] if i == 4 else [t for t in range(source.randint(1, width)) if source.random() < 0.8]
        scale = source.choice(scales)
        ratios = {t: source.gauss(0, scale) for t in positions}
        positive = {t: source.random() < 0.5 for t in positions}
        train_row = {t: -source.random() * 3 for t in positions}
        made.append(Row(ratios, train_row, positive, source.random() < 0.5, f"prompt-{i // 3}"))
        for t in positions:
            train[i][t] = train_row[t]
            rollout[i][t] = train_row[t] - ratios[t]
            advantages[i][t] = 1.0 if positive[t] else -1.0
            mask[i][t] = 1.0
    facts = {
        "train_log_probs": torch.tensor(train, dtype=torch.float64),
        "rollout_log_probs": torch.tensor(rollout, dtype=torch.float64),
        "response_mask": torch.tensor(mask).bool(),
        "advantages": torch.tensor(advantages),
        "group_ids": [row.group for row in made],
        "scores": torch.tensor([1.0 if row.correct else -1.0 for row in made]),
    }
    return made, facts


@functools.cache
def thousand() -> tuple[list[Row], dict[str, Any]]:
    """A thousand rows, each a case of its own for what looks at one row; some log-ratios are far beyond the
    safety bound."""
    return make(0, rows=1000, width=6, scales=(0.02, 0.1, 0.3, 0.6, 0.6, 15.0))


@functools.cache
def small_batches() -> list[tuple[list[Row], dict[str, Any]]]:
    """Two hundred batches of a few rows, for what looks at the whole batch."""
    return [make(seed, rows=1 + seed % 3, width=4, scales=(0.1, 0.5, 8.0)) for seed in range(200)]


def decide(
    config: RolloutCorrectionConfig, facts: dict[str, Any], way: str
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Weights and keep mask, at once or measured and corrected in uneven parts."""
    config = config.model_copy(update={"diagnostics": "core"})  # no weight depends on what is measured
    if way == "whole":
        result = compute_rollout_correction(**facts, config=config)
        return result.weights, result.keep_mask
    names = ("train_log_probs", "rollout_log_probs", "response_mask", "advantages")
    rows = facts["train_log_probs"].shape[0]
    cuts = sorted({0, rows // 7, rows // 3, rows // 3 + 1, rows})
    parts = [[facts[name][start:end] for name in names] for start, end in itertools.pairwise(cuts)]
    contexts = [SequenceContext(advantages=advantages) for *_, advantages in parts]
    measured = [measure(*part[:3], config, context) for part, context in zip(parts, contexts, strict=True)]
    batch = functools.reduce(CorrectionStatistics.merge, measured)
    results = [
        correct_sequences(*part[:3], config, context, batch)
        for part, context in zip(parts, contexts, strict=True)
    ]
    weights = [result.weights for result in results if result.weights is not None]
    return torch.cat(weights) if weights else None, torch.cat([result.keep_mask for result in results])


def kept_positions(row: Row, keep: list[bool]) -> set[int]:
    return {t for t in row.ratios if keep[t]}


def assert_kept(config: RolloutCorrectionConfig, way: str, rejected: list[set[int]]) -> None:
    """That of the thousand rows exactly ``rejected`` is left out, and that there is something of both."""
    rows, facts = thousand()
    keep = decide(config, facts, way)[1].tolist()
    assert [kept_positions(row, one) for row, one in zip(rows, keep, strict=True)] == [
        set(row.ratios) - left_out for row, left_out in zip(rows, rejected, strict=True)
    ]
    tokens, left = sum(len(row.ratios) for row in rows), sum(map(len, rejected))
    assert 0.02 * tokens < left < 0.98 * tokens


WAYS = pytest.mark.parametrize("way", ["whole", "parts"])


@WAYS
@pytest.mark.parametrize("rule", list(REJECTION_RULES))
def test_every_rule(rule: str, way: str) -> None:
    bound = threshold_of(rule)
    config = RolloutCorrectionConfig.model_validate(
        {"rollout_rs": rule, "rollout_rs_threshold": list(bound) if isinstance(bound, tuple) else bound}
    )
    assert_kept(config, way, [rejected_by(rule, row) for row in thousand()[0]])


@WAYS
@pytest.mark.parametrize("veto", [1e-4, 0.3])
def test_veto(veto: float, way: str) -> None:
    rows = thousand()[0]
    rejected = [
        set(row.ratios) if any(math.exp(x) < veto for x in row.ratios.values()) else set() for row in rows
    ]
    assert_kept(RolloutCorrectionConfig(rollout_token_veto_threshold=veto), way, rejected)


@WAYS
def test_off_policy_sequence_masking_of_a_thousand_rows(way: str) -> None:
    rejected = [
        {t for t in row.ratios if not row.positive[t] and statistics.fmean(row.ratios.values()) < -0.05}
        for row in thousand()[0]
    ]
    assert_kept(RolloutCorrectionConfig(rollout_opsm_threshold=0.05), way, rejected)


@WAYS
@pytest.mark.parametrize("threshold", [1.3, "0.8_1.3"])
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_every_level(level: str, threshold: float | str, way: str) -> None:
    rows, facts = thousand()
    config = RolloutCorrectionConfig.model_validate({"rollout_is": level, "rollout_is_threshold": threshold})
    weights, keep = decide(config, facts, way)
    assert weights is not None
    assert keep.all()
    expected = [
        [applied(raw_weight(level, row, t), threshold) if t in row.ratios else 0.0 for t in range(6)]
        for row in rows
    ]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-14)


@WAYS
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_batch_normalisation(level: str, way: str) -> None:
    fields = {"rollout_is": level, "rollout_is_batch_normalize": True}
    configs = [
        RolloutCorrectionConfig.model_validate({**fields, "rollout_is_threshold": bound})
        for bound in (1.3, "0.8_1.3")
    ]
    per_row = level in ("sequence", "geometric")
    for number, (rows, facts) in enumerate(small_batches()):
        config = configs[number % 2]
        threshold = config.rollout_is_threshold
        weights = [{t: applied(raw_weight(level, row, t), threshold) for t in row.ratios} for row in rows]
        averaged = (
            [statistics.fmean(w.values()) for w in weights if w]
            if per_row
            else [x for w in weights for x in w.values()]
        )
        mean = statistics.fmean(averaged or [1.0])
        scale = mean if mean > 1e-8 else 1.0  # weights that are all 0 stay 0
        found = decide(config, facts, way)[0]
        assert found is not None
        for row, found_row in zip(weights, found.tolist(), strict=True):
            expected_row = [row.get(t, 0.0) / scale for t in range(4)]
            assert found_row == pytest.approx(
                expected_row, rel=2e-15 / scale + 1e-12, abs=2e-16 / scale + 1e-12
            )  # kept as w - 1


RULES = "token_k1,seq_mean_k3,token_k2,seq_max_k2"
THRESHOLDS = "0.7_1.6,0.06,0.08,0.4"


def find_causes(row: Row) -> None:
    """Note for every token what rejects it under ``RULES``, ``THRESHOLDS`` and a veto at 0.6."""
    row.causes = {t: set() for t in row.ratios}
    for t, ratio in row.ratios.items():
        row.causes[t] |= {"token_k1"} if not 0.7 <= math.exp(ratio) <= 1.6 else set()
        row.causes[t] |= {"token_k2"} if ratio * ratio / 2 > 0.08 else set()
    if row.ratios:
        whole = set()
        whole |= (
            {"seq_mean_k3"}
            if statistics.fmean(statistic("k3", r) for r in row.ratios.values()) > 0.06
            else set()
        )
        whole |= {"seq_max_k2"} if max(r * r / 2 for r in row.ratios.values()) > 0.4 else set()
        whole |= {"veto"} if any(math.exp(r) < 0.6 for r in row.ratios.values()) else set()
        for causes in row.causes.values():
            causes |= whole


@pytest.mark.parametrize("seed", range(8))
def test_accounting_of_rejection(seed: int) -> None:
    rows, facts = make(seed)
    config = RolloutCorrectionConfig(
        rollout_rs=RULES,
        rollout_rs_threshold=THRESHOLDS,
        rollout_token_veto_threshold=0.6,
        diagnostics="full",
    )
    metrics = compute_rollout_correction(**facts, config=config).metrics()
    for row in rows:
        find_causes(row)
    tokens = [(row, t) for row in rows for t in row.ratios]

    def share(part: list[object], whole: list[object]) -> float:
        return len(part) / len(whole)

    splits = {
        "positive_advantage": [(row, t) for row, t in tokens if row.positive[t]],
        "negative_advantage": [(row, t) for row, t in tokens if not row.positive[t]],
        "correct": [(row, t) for row, t in tokens if row.correct],
        "wrong": [(row, t) for row, t in tokens if not row.correct],
    }
    for name, members in splits.items():
        kept = [1 for row, t in members if not row.causes[t]]
        if members:
            assert metrics[f"rollout_corr/kept_fraction_{name}"] == pytest.approx(share(kept, members)), name
        else:
            assert f"rollout_corr/kept_fraction_{name}" not in metrics
    for name, wanted in (("kept", True), ("rejected", False)):
        scores = [
            1.0 if r.correct else -1.0
            for r in rows
            if r.ratios and any(not c for c in r.causes.values()) == wanted
        ]
        if scores:
            assert metrics[f"rollout_corr/{name}_score_mean"] == pytest.approx(statistics.fmean(scores))


def effective(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)) if any(weights) else 0.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
@pytest.mark.parametrize("threshold", [1.1, "0.95_1.1", "1e-9_1e-8"])
def test_effective_sample_sizes(level: str, threshold: float | str, seed: int) -> None:
    rows, facts = make(seed)
    config = RolloutCorrectionConfig.model_validate(
        {"rollout_is": level, "rollout_is_threshold": threshold, "diagnostics": "full"}
    )
    metrics = compute_rollout_correction(**facts, config=config).metrics()
    for kind in ("raw", "applied"):
        bound = threshold if kind == "applied" else math.inf
        weights = [
            [applied(raw_weight(level, row, t), bound) for t in row.ratios] for row in rows if row.ratios
        ]
        groups: dict[str, list[float]] = {}
        for row, row_weights in zip([r for r in rows if r.ratios], weights, strict=True):
            groups.setdefault(row.group, []).append(statistics.fmean(row_weights))
        expected = {
            "token": effective([w for row_weights in weights for w in row_weights]),
            "sequence": effective([statistics.fmean(row_weights) for row_weights in weights]),
            "prompt": effective([statistics.fmean(members) for members in groups.values()]),
        }
        for name, value in expected.items():
            assert metrics[f"rollout_corr/rollout_is_ess_{kind}_{name}"] == pytest.approx(value, abs=1e-9)
            assert 0.0 <= metrics[f"rollout_corr/rollout_is_ess_{kind}_{name}"] <= 1.0


@pytest.mark.parametrize("shift", [-17.0, -100.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_effective_sample_size_of_tiny_equal_weights_is_one(level: str, shift: float) -> None:
    rollout = torch.zeros(4, 1)
    config = RolloutCorrectionConfig.model_validate({"rollout_is": level})
    metrics = compute_rollout_correction(rollout + shift, rollout, torch.ones(4, 1), config).metrics()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_misalignment_test(seed: int) -> None:
    rows, facts = make(seed)
    metrics = compute_rollout_correction(
        **facts, config=RolloutCorrectionConfig(diagnostics="full")
    ).metrics()
    values = [math.exp(ratio) for row in rows for ratio in row.ratios.values()]
    error = statistics.pstdev(values) / math.sqrt(len(values))
    expected = (statistics.fmean(values) - 1) / error
    assert metrics["rollout_corr/misalignment_z"] == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("seed", range(6))
def test_off_policy_sequence_masking(seed: int) -> None:
    rows, facts = make(seed, rows=30)
    config = RolloutCorrectionConfig(
        rollout_opsm_threshold=0.05, rollout_rs="token_k2", rollout_rs_threshold=0.08, diagnostics="full"
    )
    result = compute_rollout_correction(**facts, config=config)
    masked = [
        {t for t in row.ratios if statistics.fmean(row.ratios.values()) < -0.05 and not row.positive[t]}
        for row in rows
    ]
    far = [rejected_by("token_k2", row) for row in rows]
    assert any(masked)
    for i, row in enumerate(rows):
        assert {t for t in row.ratios if result.keep_mask[i, t]} == set(row.ratios) - masked[i] - far[i]
    metrics, tokens = result.metrics(), sum(len(row.ratios) for row in rows)
    assert metrics["rollout_corr/rollout_rs_opsm_masked_fraction"] == pytest.approx(
        sum(map(len, masked)) / tokens
    )


def test_rules_on_the_sign_of_advantages_need_them() -> None:
    _, facts = make(0)
    facts.pop("advantages")
    with pytest.raises(ValueError, match="pass advantages"):
        compute_rollout_correction(**facts, config=RolloutCorrectionConfig(rollout_opsm_threshold=0.5))
