"""What is taken off a score: the divergence from the reference policy, and the overlong penalty at its
corners."""

import pytest
import torch

from verl_rc.algorithm.advantage import apply_kl_in_reward, episode_scores
from verl_rc.algorithm.advantage.reward_shaping import overlong_penalty

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


def test_the_score_of_an_episode_by_its_source() -> None:
    turns, scores = [[1.0, 0.5], [], [-2.0]], torch.tensor([10.0, 20.0, 30.0])
    assert episode_scores(turns, None, "turns").tolist() == [1.5, 0, -2]
    assert episode_scores(turns, scores, "function").tolist() == [10, 20, 30]
    assert episode_scores(turns, scores, "sum").tolist() == [11.5, 20, 28]


def test_refuses_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"of one shape; got \(2, 3\)"):
        apply_kl_in_reward(SCORES, LOG_PROBS[:, :2], REFERENCE, MASK, 0.1)


def test_it_grows_in_a_straight_line_over_the_buffer() -> None:
    lengths = torch.tensor([1, 12, 13, 14, 16, 20])
    assert overlong_penalty(lengths, 16, 4, 0.5).tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]


def test_the_published_setting() -> None:
    lengths = torch.tensor([16384, 16384 + 1024, 20480])
    assert overlong_penalty(lengths, 20480, 4096, 1.0).tolist() == [0, -0.25, -1]
