"""The overlong penalty at its corners."""

import pytest
import torch

from verl_rc.advantage.reward_shaping import overlong_penalty


def test_it_grows_in_a_straight_line_over_the_buffer() -> None:
    lengths = torch.tensor([1, 12, 13, 14, 16, 20])
    assert overlong_penalty(lengths, 16, 4, 0.5).tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]


def test_the_published_setting() -> None:
    lengths = torch.tensor([16384, 16384 + 1024, 20480])
    assert overlong_penalty(lengths, 20480, 4096, 1.0).tolist() == [0, -0.25, -1]


@pytest.mark.parametrize("buffer_length", [0, 17])
def test_a_buffer_must_fit(buffer_length: int) -> None:
    with pytest.raises(ValueError, match=r"overlong_buffer_cfg\.len must be"):
        overlong_penalty(torch.tensor([3]), 16, buffer_length, 1.0)
