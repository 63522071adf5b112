"""Facts about sequences: ages, and shapes that must fit."""

import pytest
import torch

from verl_rc.correction import SequenceContext, compute_rollout_correction
from verl_rc.correction.context import newest_version


def test_ages_count_from_the_newest_version_or_the_given_one() -> None:
    versions, mask = (
        torch.tensor([[5, 4, 9], [3, 3, 3]]),
        torch.tensor([[True, True, False], [True, True, True]]),
    )
    newest = newest_version(versions, mask)
    assert newest == 5
    for current, expected in ((newest, [[0, 1, 0], [2, 2, 2]]), (6, [[1, 2, 0], [3, 3, 3]])):
        ages = SequenceContext(policy_versions=versions, current_version=current).ages(mask)
        assert ages is not None
        assert ages.tolist() == expected
    ages = SequenceContext(policy_versions=torch.tensor([5, 3]), current_version=5).ages(mask)
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


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 4\] and \[2, 3\]"):
        compute_rollout_correction(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3), {})
