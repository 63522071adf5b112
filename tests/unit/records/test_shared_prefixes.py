"""Rows that begin alike: as many tokens are computed as there are distinct prefixes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_rows import ragged

from verl_rc.records import microbatch
from verl_rc.records.batches import TokenBatch
from verl_rc.records.shared_prefixes import find_prefixes, prefixes_of_rows

Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


def arrays(rows: Rows) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


def num_distinct_prefixes(rows: Rows) -> int:
    return len({tuple(row[: length + 1]) for row in rows for length in range(len(row))})


def num_common(first: list[int], second: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


@given(rows=ROWS)
def test_every_distinct_prefix_is_computed_once(rows: Rows) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatch, "LEAST_SAVED", 0.0)
        found = find_prefixes(arrays(rows))
    assert sorted(found.order) == list(range(len(rows)))
    assert sum(map(len, rows)) - found.saved_tokens == num_distinct_prefixes(rows)


@given(rows=ROWS, data=st.data())
def test_rows_among_others_share_what_they_share_alone(rows: Rows, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatch, "LEAST_SAVED", 0.0)
        found = find_prefixes(arrays(rows)).of(some)
        alone = find_prefixes(arrays([rows[row] for row in some]))
    assert sorted(found.order) == list(range(len(some)))
    assert found.saved_tokens == alone.saved_tokens


@given(rows=ROWS)
def test_no_row_shares_what_is_not_there_or_less_than_a_tenth_of_it(rows: Rows) -> None:
    found = find_prefixes(arrays(rows))
    ordered = [rows[row] for row in found.order]
    for previous, row, shared in zip([[], *ordered], ordered, found.shared, strict=False):
        common = num_common(previous, row)
        assert shared == (common if 10 * common >= len(row) else 0)


def test_a_short_system_prompt_does_not_join_groups() -> None:
    """Two of 30 tokens are shared by all, 20 by each group."""
    first, second = [[7, 7, *[group] * 18] for group in (1, 2)]
    rows = [group + [10 + row] * 10 for row, group in enumerate((first, second, first, second))]
    families = find_prefixes(arrays(rows)).families()
    assert [[row for row, _ in family] for family in families] == [[0, 2], [1, 3]]
    assert [[shared for _, shared in family] for family in families] == [[0, 20], [0, 20]]


def test_tokens_with_other_columns_are_not_equal() -> None:
    """Such as the experts that a token took."""
    row = np.array([[5, 1], [6, 2], [7, 3]])
    other = row.copy()
    other[1, 1] = 9
    assert find_prefixes([row, other]).saved_tokens == 1
    assert find_prefixes([row, row]).saved_tokens == 3


def batch_of_two(**further: torch.Tensor) -> TokenBatch:
    """A prompt of 3 tokens, and 4 tokens of a response of which 3 are equal."""
    return TokenBatch(
        prompts=torch.tensor([[0, 5, 6, 7]] * 2),
        prompt_lengths=torch.tensor([3, 3]),
        responses=torch.tensor([[8, 9, 8, 4], [8, 9, 8, 3]]),
        response_lengths=torch.tensor([4, 4]),
        batch_size=[2],
        **further,
    )


def test_prompts_and_responses_of_a_batch_are_found_across_their_border() -> None:
    other = batch_of_two()
    other.prompts[1], other.prompt_lengths[1] = torch.tensor([5, 6, 7, 8]), 4
    other.responses[1] = torch.tensor([9, 8, 3, 3])
    assert prefixes_of_rows(ragged(batch_of_two()), False).saved_tokens == 6
    assert prefixes_of_rows(ragged(other), False).saved_tokens == 6


def test_a_row_shares_up_to_its_first_restart() -> None:
    restarts = torch.zeros(2, 4, dtype=torch.bool)
    restarts[0, 2] = True
    assert prefixes_of_rows(ragged(batch_of_two(restarts=restarts)), True).saved_tokens == 5


def test_rows_with_recorded_experts_share_none_in_a_model_that_replays_them() -> None:
    counts = torch.ones(2, 4, dtype=torch.int64)
    ids = torch.zeros(2, 4, dtype=torch.uint8)
    batch = batch_of_two(experts_counts=counts, experts_ids=ids)
    assert prefixes_of_rows(ragged(batch), replays=True).saved_tokens == 0
    assert prefixes_of_rows(ragged(batch), replays=False).saved_tokens == 6


def test_a_row_without_tokens_shares_none() -> None:
    assert find_prefixes(arrays([[], [1, 2], []])).saved_tokens == 0
