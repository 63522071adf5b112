"""Groups and ages of rows."""

import torch

from verl_rc.correction.context import group_slots, version_ages


def test_groups_by_any_id() -> None:
    assert group_slots(["b", "a", "b"], torch.device("cpu")).tolist() == [0, 1, 0]
    slots = group_slots(torch.tensor([7, 3, 7, 9]), torch.device("cpu"))
    assert slots[0] == slots[2]
    assert len(set(slots.tolist())) == 3


def test_ages_count_from_the_newest_version_or_the_given_one() -> None:
    versions, mask = torch.tensor([[5, 4, 9], [3, 3, 3]]), torch.tensor([[True, True, False], [True, True, True]])
    assert version_ages(versions, mask, None).tolist() == [[0, 1, 0], [2, 2, 2]]
    assert version_ages(versions, mask, 6).tolist() == [[1, 2, 0], [3, 3, 3]]
    assert version_ages(torch.tensor([5, 3]), mask, None).tolist() == [[0, 0, 0], [2, 2, 2]]
