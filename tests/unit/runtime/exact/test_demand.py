"""Exact mode demands log-probs that are equal to the last bit; NaN is not."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from verl_rc.config.run import ActorRolloutRefConfig
from verl_rc.records.batches import RolloutBatch
from verl_rc.runtime.exact import InexactError
from verl_rc.runtime.exact.demand import require_exact

TRAIN = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -4.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def demand(rollout: torch.Tensor, train: torch.Tensor = TRAIN, exact: bool = True) -> None:
    """Of two responses, the first token of each was sampled with older weights than the others."""
    policy = SimpleNamespace(
        exact=exact, model=SimpleNamespace(path="a model"), rollout=SimpleNamespace(dtype="float32")
    )
    batch = SimpleNamespace(
        response_mask=MASK, policy_versions=torch.tensor([[3, 4, 4]] * 2), rollout_log_probs=rollout
    )
    require_exact(cast(ActorRolloutRefConfig, policy), train, cast(RolloutBatch, batch), 4, "step 5")


def test_equal_ones_pass_whatever_older_weights_sampled_and_stands_outside_the_mask() -> None:
    rollout = TRAIN.clone()
    rollout[:, 0] = -9.0
    rollout[1, 2] = math.nan
    demand(rollout)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-2.0 - 2.0**-22, "1 of 3 tokens differ, by 2.38e-07 nats at most, 0 of them"),
        (math.nan, "1 of 3 tokens differ, none by a number, 1 of them not finite"),
        (-math.inf, "1 of 3 tokens differ, none by a number, 1 of them not finite"),
    ],
)
def test_the_last_bit_counts_and_so_does_nan(value: float, said: str) -> None:
    rollout = TRAIN.clone()
    rollout[0, 1] = value
    with pytest.raises(InexactError, match=f"^step 5: .*{said}.*: verl-rc exact 'a model' --dtype float32$"):
        demand(rollout)


def test_both_nan_is_no_agreement() -> None:
    nan = torch.full_like(TRAIN, math.nan)
    with pytest.raises(InexactError, match="3 of 3 tokens differ"):
        demand(nan, nan)


def test_an_ordinary_run_demands_nothing() -> None:
    demand(torch.full_like(TRAIN, math.nan), exact=False)
