"""The divergence in the reward."""

import pytest
import torch

from verl_rc.advantage import apply_kl_in_reward

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
