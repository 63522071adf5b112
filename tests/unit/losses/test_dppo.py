"""Trust regions in probabilities."""

import math

import pytest
import torch

from verl_rc.losses import compute_policy_loss


def run(name: str, old: float, new: float, advantage: float, **config: float) -> tuple[float, float, dict[str, float]]:
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
    return loss.item(), log_probs.grad.item(), {key: metric.mean().item() for key, metric in metrics.items()}


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
def test_tv_limits_moves_in_the_advantages_direction(old: float, new: float, advantage: float, trusted: bool) -> None:
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
