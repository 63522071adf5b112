"""The importance-weighted policy gradient of bypass mode."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rc.losses import compute_policy_loss

GOLDEN = [
    case
    for case in json.loads((Path(__file__).parents[2] / "golden" / "bypass_losses.json").read_text())["cases"]
    if case["config"]["loss_type"] == "reinforce"
]


def loop_weights(case: dict[str, Any]) -> list[list[float]] | None:
    """Importance weights of current over rollout, token by token in float64."""
    level, threshold = case["config"]["rollout_is"], case["config"]["rollout_is_threshold"]
    if level is None:
        return None
    low, high = [float(x) for x in threshold.split("_")] if isinstance(threshold, str) else (None, threshold)
    weights = []
    for current, rollout, mask in zip(case["log_probs"], case["rollout_log_probs"], case["response_mask"], strict=True):
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
    torch.testing.assert_close(log_probs.grad, torch.tensor(case["expected"]["grad"], dtype=torch.float64), rtol=1e-5, atol=1e-5)
    nothing_kept = 0.0
    divergence = case["expected"]["metrics"].get("actor/ppo_kl", nothing_kept)
    assert metrics["actor/ppo_kl"].mean().item() == pytest.approx(divergence, abs=1e-5)


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
