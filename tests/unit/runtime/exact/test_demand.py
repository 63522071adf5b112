"""Exact mode demands log-probs that are equal to the last bit; NaN is not."""

import math

import pytest
import torch

from verl_rc.runtime.exact import InexactError
from verl_rc.runtime.exact.demand import require_equal

TRAIN = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -4.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def demand(rollout: torch.Tensor) -> None:
    require_equal(TRAIN, rollout, MASK, "step 3", "verl-rc exact m --dtype float32")


def test_equal_ones_pass_whatever_stands_outside_the_mask() -> None:
    rollout = TRAIN.clone()
    rollout[1, 2] = math.nan
    demand(rollout)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-2.0 - 2.0**-22, "1 of 5 tokens differ, by 2.38e-07 nats at most, 0 of them"),
        (math.nan, "1 of 5 tokens differ, none by a number, 1 of them not finite"),
        (-math.inf, "1 of 5 tokens differ, none by a number, 1 of them not finite"),
    ],
)
def test_the_last_bit_counts_and_so_does_nan(value: float, said: str) -> None:
    rollout = TRAIN.clone()
    rollout[0, 1] = value
    with pytest.raises(InexactError, match=f"^step 3: .*{said}.*: verl-rc exact m --dtype float32$"):
        demand(rollout)


def test_both_nan_is_no_agreement() -> None:
    nan = torch.full_like(TRAIN, math.nan)
    with pytest.raises(InexactError, match="5 of 5 tokens differ"):
        require_equal(nan, nan, MASK, "step 3", "verl-rc exact m")
