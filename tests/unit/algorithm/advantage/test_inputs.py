"""Groups of rows, and inputs that an estimator cannot do without."""

import pytest
import torch

from verl_rc.algorithm.advantage.inputs import AdvantageInputs, make_groups, required, required_groups

COUNTED = torch.tensor([True, True, False, True, True])
SCORES = torch.tensor([1.0, 5.0, torch.nan, 2.0, 7.0])


def test_statistics_are_the_same_for_names_numbers_and_tensors() -> None:
    for group_ids in (
        ["x", "y", "x", "x", "z"],
        [30, -4, 30, 30, 2**40],
        torch.tensor([30, -4, 30, 30, 2**40]),
    ):
        groups = make_groups(group_ids, COUNTED)
        assert groups.sizes(SCORES.dtype).tolist() == [2, 1, 2, 2, 1]
        assert groups.means(SCORES).tolist() == [1.5, 5.0, 1.5, 1.5, 7.0]
        torch.testing.assert_close(groups.stds(SCORES), torch.tensor([0.5, 0.0, 0.5, 0.5, 0.0]).sqrt())
        assert groups.per_row(groups.amax(SCORES)).tolist() == [2.0, 5.0, 2.0, 2.0, 7.0]


def test_sums_keep_further_dimensions() -> None:
    groups = make_groups([0, 1, 0, 0, 1], COUNTED)
    rows = torch.arange(10.0).view(5, 2)
    assert groups.sum(rows).tolist() == [[0.0 + 6.0, 1.0 + 7.0], [2.0 + 8.0, 3.0 + 9.0]]


def test_a_group_in_which_nothing_counts_is_defined() -> None:
    groups = make_groups(["a", "b"], torch.tensor([True, False]))
    scores = torch.tensor([3.0, torch.inf])
    assert groups.means(scores).tolist() == [3.0, 0.0]
    assert groups.stds(scores)[0] == 0


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
