"""The gap and the rejections of each token age, against loops over tokens in Python floats."""

import functools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import SequenceContext, compute_rollout_correction, measure

ROWS, WIDTH, NEWEST = 14, 9, 20
RULES = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.6_1.7,0.12"}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.2},
    "token and rules": {"rollout_is": "token", "rollout_is_threshold": 1.2, **RULES},
    "band": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3", **RULES},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.2, **RULES},
}


@dataclass(frozen=True)
class Token:
    """Log-ratio and age of a token."""

    ratio: float
    age: int


def make(seed: int) -> tuple[list[list[Token]], dict[str, Tensor]]:
    """Rows of tokens, the first one empty, and the same as tensors with nonsense where there is none."""
    source = random.Random(seed)
    lengths = [0, *(source.randint(1, WIDTH) for _ in range(ROWS - 1))]
    rows = [
        [Token(source.gauss(0, 0.4), source.choice([0, 0, 1, 2, 4, 5, 9])) for _ in range(length)]
        for length in lengths
    ]
    train, rollout = torch.full((2, ROWS, WIDTH), math.nan, dtype=torch.float64)
    versions, mask = torch.full((ROWS, WIDTH), -77), torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, token in enumerate(row):
            rollout[i, t] = -1.0 - source.random()
            train[i, t] = rollout[i, t] + token.ratio
            versions[i, t] = NEWEST - token.age
            mask[i, t] = True
    tensors = {
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "response_mask": mask,
        "policy_versions": versions,
    }
    return rows, tensors


def is_rejected(row: Sequence[Token], token: Token) -> bool:
    """Under ``RULES``."""
    gap = statistics.fmean(math.exp(other.ratio) - 1 - other.ratio for other in row)
    return gap > 0.12 or not 0.6 <= math.exp(token.ratio) <= 1.7


def expected(rows: list[list[Token]], fields: dict[str, Any]) -> dict[str, float]:
    """All metrics by age, by a loop over the tokens."""
    by_age: dict[int, list[tuple[list[Token], Token]]] = {}
    for row in rows:
        for token in row:
            by_age.setdefault(min(token.age, 4), []).append((row, token))
    metrics = {}
    for age, found in by_age.items():
        name, ratios = f"rollout_corr/age_{age}", [token.ratio for _, token in found]
        metrics[f"{name}_k3_kl"] = statistics.fmean(math.exp(ratio) - 1 - ratio for ratio in ratios)
        rejected = ["rollout_rs" in fields and is_rejected(row, token) for row, token in found]
        metrics[f"{name}_rejected_fraction"] = statistics.fmean(rejected)
    return metrics


def ages_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("rollout_corr/age_")}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_against_a_loop(name: str, seed: int) -> None:
    rows, tensors = make(seed)
    config = RolloutCorrectionConfig.model_validate(CONFIGS[name])
    metrics = compute_rollout_correction(**tensors, config=config, current_version=NEWEST).metrics()
    assert ages_of(metrics) == pytest.approx(expected(rows, CONFIGS[name]), rel=1e-9, abs=1e-12)
    ages = [token.age for row in rows for token in row]
    assert metrics["rollout_corr/token_age_mean"] == pytest.approx(statistics.fmean(ages))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_neither_micro_batches_nor_their_order_count(name: str, seed: int) -> None:
    _, tensors = make(seed)
    config = RolloutCorrectionConfig.model_validate(CONFIGS[name])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    parts = []
    for some in order.split([1, 6, 4, 3]):
        train, rollout, mask, versions = (tensor[some] for tensor in tensors.values())
        parts.append(
            measure(
                train,
                rollout,
                mask,
                config,
                SequenceContext(policy_versions=versions, current_version=NEWEST),
            )
        )
    merged = functools.reduce(lambda one, two: one.merge(two), parts)
    reduced = parts[0].with_vectors(
        torch.stack([part.sums for part in parts]).sum(dim=0),
        torch.stack([part.maxima for part in parts]).amax(dim=0),
    )
    whole = compute_rollout_correction(**tensors, config=config, current_version=NEWEST).metrics()
    assert len(ages_of(whole)) >= 6
    for statistics_of_parts in (merged, reduced):
        assert ages_of(statistics_of_parts.metrics(config)) == pytest.approx(
            ages_of(whole), rel=1e-9, abs=1e-12
        )


def test_a_token_that_is_rejected_for_its_log_prob_counts_as_rejected_and_in_no_gap() -> None:
    mask, versions = (
        torch.ones(1, 4, dtype=torch.bool),
        torch.tensor([[NEWEST, NEWEST, NEWEST - 1, NEWEST - 1]]),
    )
    train, rollout = torch.full((1, 4), -1.0), torch.tensor([[-1.0, -math.inf, -1.5, -1.5]])
    config = RolloutCorrectionConfig(nonfinite_logprob="reject_token")
    metrics = compute_rollout_correction(
        train, rollout, mask, config, policy_versions=versions, current_version=NEWEST
    ).metrics()
    assert metrics["rollout_corr/age_0_rejected_fraction"] == 0.5
    assert metrics["rollout_corr/age_0_k3_kl"] == 0.0
    assert metrics["rollout_corr/age_1_k3_kl"] == pytest.approx(math.exp(0.5) - 1.5)


def test_ages_are_measured_alike_with_any_diagnostics() -> None:
    _, tensors = make(0)
    core, full = (
        compute_rollout_correction(**tensors, config=RolloutCorrectionConfig(diagnostics=some)).metrics()
        for some in ("core", "full")
    )
    assert ages_of(core) == ages_of(full) != {}


def test_nothing_is_read_from_the_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        log_probs, mask = torch.empty(3, 4), torch.ones(3, 4, dtype=torch.bool)
        versions = torch.zeros(3, 4, dtype=torch.int64)
        result = compute_rollout_correction(
            log_probs, log_probs, mask, {"rollout_is": "token"}, policy_versions=versions
        )
        assert [f"age_{age}_k3_kl" in result.statistics.layout.splits for age in range(6)] == [True] * 5 + [
            False
        ]
