"""Weighted files: shares kept in every batch, every row in its turn, exact resume at any point."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.data.epoch_batches import MixedBatches, interleave

WEIGHTS = st.lists(st.floats(0.05, 20), min_size=1, max_size=5)


def served(batches, epochs):
    return [list(batches) for _ in range(epochs)]


def test_a_pattern_by_hand():
    assert interleave([3, 1], 8) == [0, 0, 1, 0, 0, 0, 1, 0]
    assert interleave([0.2, 0.2], 4) == [0, 1, 0, 1]


@given(weights=WEIGHTS, count=st.integers(1, 200))
def test_at_every_position_each_file_is_near_its_share(weights, count):
    order = interleave(weights, count)
    for position in range(1, count + 1):
        counts = Counter(order[:position])
        for file, weight in enumerate(weights):
            assert abs(counts[file] - position * weight / sum(weights)) <= max(1, len(weights) - 1) + 1e-9


def test_every_batch_has_the_shares():
    for epoch in served(MixedBatches([40, 4], [3, 1], 4, seed=1, shuffle=True), 5):
        assert [sum(row >= 40 for row in batch) for batch in epoch] == [1] * 11


def test_a_small_file_is_passed_through_again_each_time_in_a_new_order():
    """22 rows of the first file in 2 epochs of 11 batches, 22 of the second, which has 2: 11 passes."""
    epochs = served(MixedBatches([20, 2], [1, 1], 2, seed=3, shuffle=True), 2)
    flat = [row for epoch in epochs for batch in epoch for row in batch]
    small = [row for row in flat if row >= 20]
    passes = [tuple(small[start : start + 2]) for start in range(0, 22, 2)]
    assert all(set(one) == {20, 21} for one in passes)
    assert len(set(passes)) == 2
    large = [row for row in flat if row < 20]
    assert sorted(large[:20]) == list(range(20))
    assert len(large) == 22


def test_without_shuffle_files_keep_their_order_and_go_on_over_epochs():
    epochs = served(MixedBatches([5, 3], [1, 1], 4, seed=1, shuffle=False), 2)
    assert epochs == [[[0, 5, 1, 6], [2, 7, 3, 5]], [[4, 6, 0, 7], [1, 5, 2, 6]]]


def test_the_order_depends_on_seed_and_weights():
    orders = [
        served(MixedBatches([30, 30], weights, 6, seed, True), 1)[0] for weights, seed in (([1, 1], 1), ([1, 1], 2), ([1, 2], 1))
    ]
    assert orders[0] == served(MixedBatches([30, 30], [1, 1], 6, 1, True), 1)[0]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.mark.parametrize("taken", range(8))
def test_resume_after_any_number_of_batches(taken):
    def fresh():
        return MixedBatches([5, 3], [1, 3], 3, seed=7, shuffle=True)

    whole = [batch for epoch in served(fresh(), 4) for batch in epoch]
    first = fresh()
    flow = (batch for _ in range(4) for batch in first)
    begun = [next(flow) for _ in range(taken)]
    second = fresh()
    second.load_state_dict(first.state_dict())
    assert begun + [batch for _ in range(4) for batch in second][: 8 - taken] == whole


def test_state_of_another_mixture_is_refused():
    state = MixedBatches([6, 2], [1, 1], 2, 3, True).state_dict()
    for sizes, weights in (([6, 2], [1, 2]), ([5, 3], [1, 1])):
        with pytest.raises(ValueError, match=r"Restore data.train_files, data.train_weights"):
            MixedBatches(sizes, weights, 2, 3, True).load_state_dict(state)


def test_a_file_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"at least one row left .* got \[4, 0\] rows"):
        MixedBatches([4, 0], [1, 1], 2, 1, True)
