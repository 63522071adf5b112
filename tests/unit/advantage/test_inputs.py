"""Inputs that an estimator cannot do without."""

import pytest
import torch

from verl_rc.advantage.groups import make_groups
from verl_rc.advantage.inputs import AdvantageInputs, required, required_groups


def test_required_returns_what_is_there_and_names_what_is_missing() -> None:
    ones = torch.ones(1, 1)
    assert required(ones, "values", "gae") is ones
    with pytest.raises(ValueError, match=r"'gae' needs values; pass values=\.\.\."):
        required(None, "values", "gae")


def test_required_groups_asks_for_group_ids() -> None:
    groups = make_groups(["a"], torch.ones(1, dtype=torch.bool))
    inputs = AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), groups)
    assert required_groups(inputs, "grpo") is groups
    with pytest.raises(ValueError, match=r"'grpo' compares answers to one prompt; pass group_ids="):
        required_groups(AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)), "grpo")
