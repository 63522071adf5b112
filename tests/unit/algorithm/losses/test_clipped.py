"""The clipped surrogates and the smooth gate, by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_rc.algorithm.losses import compute_policy_loss

GOLDEN = [
    case
    for case in json.loads((Path(__file__).parents[3] / "golden" / "bypass_losses.json").read_text())["cases"]
    if case["config"]["loss_type"] == "ppo_clip"
]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (4.0, -1.0, 3.0, 0.0),
        (4.0, -2.0, 6.0, 0.0),
    ],
)
def test_value_and_slope_in_each_region(
    ratio: float, advantage: float, expected: float, slope: float
) -> None:
    log_probs = torch.tensor([[math.log(ratio) - 2]], dtype=torch.float64, requires_grad=True)
    loss, _ = compute_policy_loss(
        "vanilla",
        torch.full_like(log_probs, -2.0),
        log_probs,
        torch.full_like(log_probs, advantage),
        torch.ones(1, 1),
        rollout_is_weights=torch.full((1, 1), 0.5),
        config={"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * expected)
    assert log_probs.grad.item() == pytest.approx(0.5 * slope)


def test_shares_of_clipped_and_bounded_tokens_are_over_kept_tokens() -> None:
    ratios = torch.tensor([[1.5, 1.0, 1.0, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    _, metrics = compute_policy_loss(
        "vanilla", torch.zeros(1, 4), ratios.log(), advantages, torch.tensor([[1, 1, 0, 1]]), torch.ones(1, 4)
    )
    assert metrics["actor/pg_clipfrac"].value.item() == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"].value.item() == pytest.approx(1 / 3)
    assert metrics["actor/ppo_kl"].value.item() == pytest.approx(-math.log(1.5 * 9.0) / 3)


def test_a_ratio_beyond_the_safety_bound_is_finite() -> None:
    loss, _ = compute_policy_loss(
        "vanilla",
        torch.tensor([[-500.0]]),
        torch.tensor([[0.0]]),
        torch.tensor([[-1.0]]),
        torch.ones(1, 1),
        config={"clip_ratio_c": 1e30},
    )
    assert loss.item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{i}-{c['preset']}" for i, c in enumerate(GOLDEN)])
def test_bypass_with_rollout_as_old_policy_equals_golden(case: dict[str, Any]) -> None:
    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(case[name], dtype=torch.float64)

    log_probs = tensor("log_probs").requires_grad_()
    kept = torch.tensor(case["expected"]["keep_mask"])
    loss, metrics = compute_policy_loss(
        "vanilla",
        tensor("rollout_log_probs"),
        log_probs,
        tensor("advantages"),
        kept,
        tensor("response_mask"),
        denominator_mask=kept,
        aggregation=case["loss_agg_mode"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-5)
    torch.testing.assert_close(
        log_probs.grad, torch.tensor(case["expected"]["grad"], dtype=torch.float64), rtol=1e-5, atol=1e-5
    )
    for name, metric in metrics.items():
        nothing_kept = 0.0
        assert metric.value.item() == pytest.approx(
            case["expected"]["metrics"].get(name, nothing_kept), abs=1e-5
        )


def test_one_row_by_hand() -> None:
    gaps = torch.tensor([[0.3, -0.1, 0.4, 7.0]], dtype=torch.float64)
    log_probs = (gaps - 1).requires_grad_()
    response = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = compute_policy_loss(
        "gspo",
        torch.full_like(gaps, -1),
        log_probs,
        torch.full_like(gaps, -2.0),
        response,
        config={"clip_ratio": 0.5},
    )
    ratio = math.exp((0.3 - 0.1 + 0.4) / 3)
    loss.backward()
    assert loss.item() == pytest.approx(2 * ratio)
    assert log_probs.grad[0].tolist() == pytest.approx([2 * ratio / 3] * 3 + [0])
    assert metrics["actor/ppo_kl"].value.item() == pytest.approx(-0.2)


def test_rejecting_a_token_removes_its_term_and_keeps_the_sequence_ratio() -> None:
    gaps = torch.tensor([[0.3, -0.1, 0.4]], dtype=torch.float64)
    arguments = (torch.zeros_like(gaps), gaps, torch.full_like(gaps, -1.0))
    response, kept = torch.ones(1, 3), torch.tensor([[1, 0, 1]])
    loss, _ = compute_policy_loss("gspo", *arguments, kept, response, config={"clip_ratio": 0.5})
    assert loss.item() == pytest.approx(2 * math.exp(0.2) / 3)


def test_the_log_ratio_is_bounded_at_ten() -> None:
    gap = torch.tensor([[50.0]])
    loss, _ = compute_policy_loss("gspo", -gap, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1))
    assert loss.item() == pytest.approx(math.exp(10), rel=1e-5)


CONFIG = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}


def test_equals_a_loop_in_float64(make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=9)
    loss, _ = compute_policy_loss("geo_mean", **batch.policy_loss_arguments(), config=CONFIG)
    total, rows = 0.0, 0
    for row in range(6):
        tokens = batch.response_mask[row].nonzero().flatten().tolist()
        kept = batch.loss_mask[row].nonzero().flatten().tolist()
        rows += bool(tokens)
        if not kept:
            continue
        exponents = []
        for t in tokens:
            gap = (batch.log_probs - batch.old_log_probs)[row, t].item()
            exponents.append(min(gap, 0.4) if batch.advantages[row, t] > 0 else max(gap, -0.3))
        advantage = sum(batch.advantages[row, t].item() for t in tokens) / len(tokens)
        weight = math.exp(sum(math.log(batch.weights[row, t].item() + 1e-10) for t in kept) / len(kept))
        total -= weight * advantage * math.exp(sum(exponents) / len(exponents))
    assert loss.item() == pytest.approx(total / rows)


def one_row(kept: list[int], weights: list[float]) -> tuple[float, list[float]]:
    gaps = torch.tensor([[0.1, -0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    loss, _ = compute_policy_loss(
        "geo_mean",
        torch.zeros_like(gaps),
        gaps,
        torch.ones(1, 3),
        torch.tensor([kept]),
        torch.ones(1, 3),
        rollout_is_weights=torch.tensor([weights], dtype=torch.float64),
        config=CONFIG,
    )
    loss.backward()
    return loss.item(), gaps.grad[0].tolist()


def test_rejecting_a_token_takes_its_gradient_and_leaves_the_ratio() -> None:
    ratio = math.exp(0.2 / 3)
    loss, gradient = one_row([1, 0, 1], [1.0, 1.0, 1.0])
    assert loss == pytest.approx(-ratio)
    assert gradient == pytest.approx([-ratio / 3, 0, -ratio / 3])


def test_a_weight_of_zero_is_a_rejection_and_does_not_shrink_the_row() -> None:
    ratio = math.exp(0.2 / 3)
    loss, gradient = one_row([1, 1, 1], [2.0, 0.0, 2.0])
    assert loss == pytest.approx(-2 * ratio)
    assert gradient == pytest.approx([-2 * ratio / 3, 0, -2 * ratio / 3])
    assert one_row([1, 1, 1], [0.0, 0.0, 0.0]) == (0.0, [0.0, 0.0, 0.0])


def test_shares_outside_the_band_are_split_by_the_sign_of_the_advantage() -> None:
    gaps = torch.tensor([[0.5, 0.0, -0.5], [-0.5, 0.1, 0.0]])
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    _, metrics = compute_policy_loss(
        "geo_mean", torch.zeros(2, 3), gaps, advantages, torch.ones(2, 3), config=CONFIG
    )
    assert metrics["actor/pg_clipfrac"].value.item() == pytest.approx(2 / 6)
    assert metrics["actor/pg_clipfrac_lower"].value.item() == pytest.approx(1 / 6)


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 2.0), (-1.5, 3.0), (0.0, 3.0)])
def test_value_by_hand_and_slope_of_the_surrogate_at_ratio_one(advantage: float, tau: float) -> None:
    config = {"tau_pos": 2.0, "tau_neg": 3.0}
    for ratio in (0.5, 1.0, 2.0):
        log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        zeros = torch.zeros(1, 1, dtype=torch.float64)
        loss, _ = compute_policy_loss(
            "sapo", zeros, log_probs, zeros + advantage, torch.ones(1, 1), config=config
        )
        loss.backward()
        assert loss.item() == pytest.approx(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
        if ratio == 1:
            assert log_probs.grad.item() == pytest.approx(-advantage)


def test_rows_are_averaged_before_the_batch_whatever_the_mode() -> None:
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for mode in ("token-mean", "token-sum"):
        loss, _ = compute_policy_loss(
            "sapo",
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            advantages,
            mask,
            config={"tau_neg": 1.0},
            aggregation=mode,
        )
        assert loss.item() == pytest.approx((-2.0 + 4.0) / 2)
