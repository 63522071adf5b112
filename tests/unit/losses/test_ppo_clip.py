"""The clipped surrogate with dual clip, by hand and in bypass mode."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_rc.losses import compute_policy_loss

GOLDEN = [
    case
    for case in json.loads((Path(__file__).parents[2] / "golden" / "bypass_losses.json").read_text())["cases"]
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
def test_value_and_slope_in_each_region(ratio: float, advantage: float, expected: float, slope: float) -> None:
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
    assert metrics["actor/pg_clipfrac"].mean().item() == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"].mean().item() == pytest.approx(1 / 3)
    assert metrics["actor/ppo_kl"].mean().item() == pytest.approx(-math.log(1.5 * 9.0) / 3)


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
    torch.testing.assert_close(log_probs.grad, torch.tensor(case["expected"]["grad"], dtype=torch.float64), rtol=1e-5, atol=1e-5)
    for name, metric in metrics.items():
        nothing_kept = 0.0
        assert metric.mean().item() == pytest.approx(case["expected"]["metrics"].get(name, nothing_kept), abs=1e-5)
