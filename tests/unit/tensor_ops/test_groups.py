"""Groups by ids of any kind."""

import torch

from verl_rc.tensor_ops.masked import group_numbers


def test_groups_by_any_id() -> None:
    assert group_numbers(["b", "a", "b"], torch.device("cpu")).tolist() == [0, 1, 0]
    slots = group_numbers(torch.tensor([7, 3, 7, 9]), torch.device("cpu"))
    assert slots[0] == slots[2]
    assert len(set(slots.tolist())) == 3
