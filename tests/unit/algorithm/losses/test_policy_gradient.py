"""Policy gradients with a constant ratio or none, by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rc.algorithm.losses import compute_policy_loss


def test_two_tokens_by_hand_without_looking_at_the_old_policy() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -4.0]], requires_grad=True)
    loss, metrics = compute_policy_loss(
        "gpg",
        torch.full((1, 3), torch.inf),
        log_probs,
        torch.tensor([[1.0, 3.0, 9.0]]),
        torch.tensor([[1, 1, 0]]),
        rollout_is_weights=torch.tensor([[2.0, 0.5, 9.0]]),
    )
    loss.backward()
    assert loss.item() == pytest.approx((2 * 1 + 0.5 * 6) / 2)
    assert log_probs.grad[0].tolist() == [-1.0, -0.75, 0.0]
    assert metrics == {}


GOLDEN = [
    case
    for case in json.loads((Path(__file__).parents[3] / "golden" / "bypass_losses.json").read_text())["cases"]
    if case["config"]["loss_type"] == "reinforce"
]


def loop_weights(case: dict[str, Any]) -> list[list[float]] | None:
    """Importance weights of current over rollout, token by token in float64."""
    level, threshold = case["config"]["rollout_is"], case["config"]["rollout_is_threshold"]
    if level is None:
        return None
    low, high = [float(x) for x in threshold.split("_")] if isinstance(threshold, str) else (None, threshold)
    weights = []
    for current, rollout, mask in zip(
        case["log_probs"], case["rollout_log_probs"], case["response_mask"], strict=True
    ):
        gaps = [(c - r) * m for c, r, m in zip(current, rollout, mask, strict=True)]
        if level == "sequence":
            gaps = [sum(gaps)] * len(gaps)
        row = [math.exp(min(max(gap, -20), 20)) for gap in gaps]
        row = [min(w, high) for w in row] if low is None else [w if low <= w <= high else 0.0 for w in row]
        weights.append([w * m for w, m in zip(row, mask, strict=True)])
    if case["config"]["rollout_is_batch_normalize"]:
        mean = sum(map(sum, weights)) / sum(map(sum, case["response_mask"]))
        weights = [[w / mean for w in row] for row in weights]
    return weights


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{i}-{c['preset']}" for i, c in enumerate(GOLDEN)])
def test_loss_and_gradient_equal_golden(case: dict[str, Any]) -> None:
    def tensor(name: str) -> Tensor:
        return torch.tensor(case[name], dtype=torch.float64)

    log_probs = tensor("log_probs").requires_grad_()
    kept, weights = torch.tensor(case["expected"]["keep_mask"]), loop_weights(case)
    loss, metrics = compute_policy_loss(
        "reinforce",
        tensor("rollout_log_probs"),
        log_probs,
        tensor("advantages"),
        kept,
        tensor("response_mask"),
        denominator_mask=kept,
        rollout_is_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
        aggregation=case["loss_agg_mode"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-5)
    torch.testing.assert_close(
        log_probs.grad, torch.tensor(case["expected"]["grad"], dtype=torch.float64), rtol=1e-5, atol=1e-5
    )
    nothing_kept = 0.0
    divergence = case["expected"]["metrics"].get("actor/ppo_kl", nothing_kept)
    assert metrics["actor/ppo_kl"].value.item() == pytest.approx(divergence, abs=1e-5)


def test_uncapped_weights_give_the_gradient_of_the_unclipped_surrogate() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, advantages = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    current = (rollout + 0.3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(4, 5, generator=generator) < 0.7
    weights = (current.detach() - rollout).exp()
    loss, _ = compute_policy_loss("reinforce", rollout, current, advantages, mask, rollout_is_weights=weights)
    (gradient,) = torch.autograd.grad(loss, current)
    surrogate = (-advantages * (current - rollout).exp())[mask].sum() / mask.sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(surrogate, current)[0])


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.8), (0.9, 0.9), (3.0, 3.0), (9.0, 6.0)])
def test_every_token_keeps_a_gradient_scaled_by_the_clipped_ratio(ratio: float, weight: float) -> None:
    log_probs = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    loss, metrics = compute_policy_loss(
        "cispo",
        log_probs.detach() - math.log(ratio),
        log_probs,
        torch.tensor([[2.0]]),
        torch.ones(1, 1),
        config={"clip_ratio_low": 0.2, "clip_ratio_high": 5.0},
    )
    loss.backward()
    assert loss.item() == pytest.approx(2 * weight * 1.5)
    assert log_probs.grad.item() == pytest.approx(-2 * weight)
    assert metrics["actor/pg_clipfrac"].value.item() == float(ratio != weight)


def run(
    name: str, old: float, new: float, advantage: float, **config: float
) -> tuple[float, float, dict[str, float]]:
    log_probs = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    loss, metrics = compute_policy_loss(
        name,
        torch.tensor([[math.log(old)]], dtype=torch.float64),
        log_probs,
        torch.tensor([[advantage]]),
        torch.ones(1, 1),
        config={"clip_ratio_low": 0.1, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, **config},
    )
    loss.backward()
    return loss.item(), log_probs.grad.item(), {key: metric.value.item() for key, metric in metrics.items()}


@pytest.mark.parametrize(
    ("old", "new", "advantage", "trusted"),
    [
        (0.5, 0.69, 1.0, True),
        (0.5, 0.71, 1.0, False),
        (0.5, 0.1, 1.0, True),
        (0.5, 0.41, -1.0, True),
        (0.5, 0.39, -1.0, False),
        (0.5, 0.9, -1.0, True),
    ],
)
def test_tv_limits_moves_in_the_advantages_direction(
    old: float, new: float, advantage: float, trusted: bool
) -> None:
    loss, slope, metrics = run("dppo_tv", old, new, advantage)
    assert loss == pytest.approx(-advantage * new / old * math.log(new) if trusted else 0)
    assert slope == pytest.approx(-advantage * new / old if trusted else 0)
    assert metrics["actor/pg_clipfrac"] == float(not trusted)


def binary_kl(old: float, new: float) -> float:
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("old", [0.2, 0.5, 0.9])
def test_kl_limits_moves_in_the_advantages_direction(old: float, advantage: float) -> None:
    seen = set()
    for new in (0.01, 0.05, 0.15, 0.3, 0.5, 0.6, 0.8, 0.95, 0.999):
        limit = 0.2 if advantage > 0 else 0.1
        trusted = binary_kl(old, new) <= limit or (new <= old if advantage > 0 else new >= old)
        loss, _, metrics = run("dppo_kl", old, new, advantage, clip_ratio_c=1e9)
        assert loss == pytest.approx(-advantage * new / old * math.log(new) if trusted else 0)
        assert metrics["actor/pg_clipfrac"] == float(not trusted)
        seen.add(trusted)
    assert seen == {True, False}


def test_the_ratio_is_capped() -> None:
    loss, _, metrics = run("dppo_tv", 0.01, 0.1, 1.0)
    assert loss == pytest.approx(-3 * math.log(0.1))
    assert metrics["actor/pg_clipfrac_lower"] == 1


@pytest.mark.parametrize("pair", [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
def test_certain_tokens_have_finite_losses(pair: tuple[float, float]) -> None:
    loss, slope, _ = run("dppo_kl", *pair, 1.0)
    assert math.isfinite(loss)
    assert math.isfinite(slope)


def test_leaving_a_certain_token_has_the_divergence_of_that_token_alone() -> None:
    for limit, trusted in ((0.68, False), (0.70, True)):
        loss, _, _ = run("dppo_kl", 1.0, 0.5, -1.0, clip_ratio_low=limit)
        assert loss == pytest.approx(0.5 * math.log(0.5) if trusted else 0)


@pytest.mark.parametrize("beta", [0.1, 2.5])
def test_equals_a_loop_in_float64(beta: float, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=8)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, metrics = compute_policy_loss(
        "dro", **{**batch.policy_loss_arguments(), "log_probs": log_probs}, config={"dro_beta": beta}
    )
    loss.backward()
    total, count, gap_total, kept = 0.0, 0, 0.0, 0
    slopes = torch.zeros_like(batch.log_probs)
    for row, column in batch.response_mask.nonzero().tolist():
        count += 1
        if not batch.loss_mask[row, column]:
            continue
        kept += 1
        lp, advantage, weight = (
            x[row, column].item() for x in (batch.log_probs, batch.advantages, batch.weights)
        )
        gap = lp - batch.old_log_probs[row, column].item()
        gap_total -= gap
        total -= weight * (lp * advantage - beta / 2 * gap**2)
        slopes[row, column] = -weight * (advantage - beta * gap)
    assert loss.item() == pytest.approx(total / count)
    torch.testing.assert_close(log_probs.grad, slopes / count)
    assert metrics["actor/ppo_kl"].value.item() == pytest.approx(gap_total / kept)


def test_needs_a_beta() -> None:
    with pytest.raises(ValueError, match=r"policy_loss\.dro_beta > 0, got None"):
        compute_policy_loss("dro", *[torch.zeros(1, 1)] * 4)
