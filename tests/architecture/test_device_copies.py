"""What runs on the device never waits for it, but for announced copies: found by running it, whatever the
spelling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from verl_rc.algorithm.advantage import advantage_estimator_names, apply_kl_in_reward, compute_advantages
from verl_rc.algorithm.losses import compute_policy_loss, compute_value_loss
from verl_rc.config.algorithms import LOSS_MODES
from verl_rc.tensor_ops import kl_penalty

ROWS, WIDTH = 6, 4
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "bool": lambda t: bool(t.any()),
    "if": lambda t: 1 if t.any() else 0,
    "numpy": lambda t: t.numpy(),
    "boolean index": lambda t: t[t > 0],
    "nonzero": lambda t: t.nonzero(),
}
"""Every way to make the host wait for the device."""


@pytest.mark.parametrize("way", READS)
def test_the_mode_refuses_every_way_to_read(way: str) -> None:
    with (
        FakeTensorMode(),
        pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)),
    ):
        READS[way](torch.ones(3))


def grid() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def mask() -> Tensor:
    return torch.ones(ROWS, WIDTH, dtype=torch.bool)


@pytest.mark.parametrize("name", LOSS_MODES)
def test_policy_losses(name: str) -> None:
    with FakeTensorMode():
        log_probs = grid().requires_grad_()
        config = {"dro_beta": 0.5}
        loss, _ = compute_policy_loss(
            name, grid(), log_probs, grid(), mask(), rollout_is_weights=grid().exp(), config=config
        )
        loss.backward()
    assert log_probs.grad is not None


@pytest.mark.parametrize("name", advantage_estimator_names())
def test_estimators(name: str) -> None:
    with FakeTensorMode():
        advantages, _ = compute_advantages(
            name,
            grid(),
            mask(),
            group_ids=[0, 0, 0, 1, 1, 1],
            values=grid(),
            reward_baselines=torch.randn(ROWS),
            component_scores=torch.randn(ROWS, 2),
            old_log_probs=grid(),
            sum_pi_squared=grid().abs(),
        )
    assert advantages.shape == (ROWS, WIDTH)


def test_value_loss_and_penalties() -> None:
    with FakeTensorMode():
        compute_value_loss(grid(), grid(), grid(), mask(), 0.2, "token-mean")
        apply_kl_in_reward(grid(), grid(), grid(), mask(), 0.1, "k3")
        for kind in ("k1", "k2", "k3", "abs"):
            kl_penalty(grid(), grid(), kind)
