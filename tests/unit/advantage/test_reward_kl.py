"""The divergence in the reward and its controllers."""

from dataclasses import asdict

import pytest
import torch

from verl_rc.advantage import KLController, apply_kl_in_reward

MASK = torch.tensor([[1, 1, 0], [0, 0, 0]])
SCORES = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, torch.nan], [torch.nan] * 3])
REFERENCE = torch.tensor([[-1.5, -1.0, -1.0], [-1.0] * 3])


@pytest.mark.parametrize(("kind", "first", "second"), [("kl", 0.5, -1.0), ("k2", 0.125, 0.5)])
def test_rewards_and_row_divergences_by_hand(kind: str, first: float, second: float) -> None:
    rewards, divergence = apply_kl_in_reward(SCORES, LOG_PROBS, REFERENCE, MASK, 0.1, kind)
    assert rewards[0].tolist() == pytest.approx([-0.1 * first, 1 - 0.1 * second, 0.0])
    assert rewards[1].tolist() == [0.0, 0.0, 2.0]
    assert divergence.tolist() == pytest.approx([(first + second) / 2, 0.0])


def test_refuses_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"of one shape; got \(2, 3\)"):
        apply_kl_in_reward(SCORES, LOG_PROBS[:, :2], REFERENCE, MASK, 0.1)


def test_a_fixed_controller_stays() -> None:
    controller = KLController(0.3)
    assert controller.updated(99.0, 1024) is controller


@pytest.mark.parametrize(("observed", "factor"), [(0.11, 1 + 0.1 * 64 / 1000), (9.0, 1 + 0.2 * 0.064), (0.0, 1 - 0.2 * 0.064)])
def test_an_adaptive_controller_follows_the_clipped_relative_error(observed: float, factor: float) -> None:
    controller = KLController(0.5, target_kl=0.1, horizon=1000)
    assert controller.updated(observed, 64).kl_coef == pytest.approx(0.5 * factor)


def test_a_saved_controller_continues_where_it_was() -> None:
    controller = KLController(0.5, target_kl=0.1, horizon=1000).updated(0.3, 64)
    assert KLController(**asdict(controller)) == controller


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0,), r"kl_ctrl\.kl_coef must be >= 0, got -1"),
        ((1.0, 0.0), r"kl_ctrl\.target_kl must be > 0"),
        ((1.0, 0.1, 0), r"kl_ctrl\.horizon must be > 0"),
    ],
)
def test_refuses_controllers_that_cannot_control(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLController(*arguments)
