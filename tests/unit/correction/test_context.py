"""Groups and ages of rows."""

import pytest
import torch

from verl_rc.correction import RowContext, compute_rollout_correction
from verl_rc.correction.context import group_slots, newest_version


def test_groups_by_any_id() -> None:
    assert group_slots(["b", "a", "b"], torch.device("cpu")).tolist() == [0, 1, 0]
    slots = group_slots(torch.tensor([7, 3, 7, 9]), torch.device("cpu"))
    assert slots[0] == slots[2]
    assert len(set(slots.tolist())) == 3


def test_ages_count_from_the_newest_version_or_the_given_one() -> None:
    versions, mask = torch.tensor([[5, 4, 9], [3, 3, 3]]), torch.tensor([[True, True, False], [True, True, True]])
    newest = newest_version(versions, mask)
    assert newest == 5
    for current, expected in ((newest, [[0, 1, 0], [2, 2, 2]]), (6, [[1, 2, 0], [3, 3, 3]])):
        ages = RowContext(policy_versions=versions, current_version=current).ages(mask)
        assert ages is not None
        assert ages.tolist() == expected
    ages = RowContext(policy_versions=torch.tensor([5, 3]), current_version=5).ages(mask)
    assert ages is not None
    assert ages.tolist() == [[0, 0, 0], [2, 2, 2]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advantages", torch.zeros(3)),
        ("policy_versions", torch.zeros(4, dtype=torch.int64)),
        ("scores", torch.zeros(3, 3)),
        ("group_ids", ["a", "b"]),
    ],
)
def test_facts_must_fit_the_rows(name: str, value: object) -> None:
    square = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        compute_rollout_correction(square, square, square, {"diagnostics": "full"}, **{name: value})
