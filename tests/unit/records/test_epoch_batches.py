"""The order of rows of one file and of weighted ones: complete, seeded, new in every epoch, the same after a
resume."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.records.dataset import EpochBatches, MixedBatches, spread_files_by_weight


def served(batches: EpochBatches, epochs: int) -> list[list[list[int]]]:
    return [list(batches) for _ in range(epochs)]


def test_an_epoch_serves_every_row_once_when_batches_divide_the_rows():
    (epoch,) = served(EpochBatches(12, 3, seed=5, shuffle=True), 1)
    assert [len(batch) for batch in epoch] == [3, 3, 3, 3]
    assert sorted(row for batch in epoch for row in batch) == list(range(12))


def test_an_incomplete_last_batch_is_left_out_and_differs_by_epoch():
    epochs = served(EpochBatches(10, 3, seed=5, shuffle=True), 30)
    left_out = [set(range(10)) - {row for batch in epoch for row in batch} for epoch in epochs]
    assert all(len(rows) == 1 for rows in left_out)
    assert len(set.union(*left_out)) > 5


def test_the_order_depends_on_seed_and_epoch_only():
    one, same = served(EpochBatches(8, 2, 1, True), 2), served(EpochBatches(8, 2, 1, True), 2)
    assert one == same
    others = [served(EpochBatches(8, 2, seed, True), 1)[0] for seed in (2, -1)]
    orders = [one[0], one[1], *others]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_without_shuffle_the_order_of_the_file_is_kept():
    assert served(EpochBatches(5, 2, seed=1, shuffle=False), 2) == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize("taken", range(9))
def test_resume_after_any_number_of_batches(taken):
    """3 batches an epoch: 3 and 6 are epoch borders."""
    whole = [batch for epoch in served(EpochBatches(7, 2, 3, True), 4) for batch in epoch]
    first = EpochBatches(7, 2, 3, True)
    flow = (batch for _ in range(4) for batch in first)
    begun = [next(flow) for _ in range(taken)]
    second = EpochBatches(7, 2, 3, True)
    second.load_state_dict(first.state_after(taken))
    assert (second.epoch, second.position) == divmod(taken, 3)
    rest = [batch for _ in range(4) for batch in second][: 12 - taken]
    assert begun + rest == whole


def test_state_of_other_data_is_refused():
    state = EpochBatches(7, 2, 3, True).state_after(1)
    for other in (EpochBatches(8, 2, 3, True), EpochBatches(7, 3, 3, True), EpochBatches(7, 2, 4, True)):
        with pytest.raises(ValueError, match="a resumed run must read the data it was started with"):
            other.load_state_dict(state)


WEIGHTS = st.lists(st.floats(0.05, 20), min_size=1, max_size=5)


def served_mixed(batches, epochs):
    return [list(batches) for _ in range(epochs)]


def test_a_pattern_by_hand():
    assert spread_files_by_weight([3, 1], 8) == [0, 0, 1, 0, 0, 0, 1, 0]
    assert spread_files_by_weight([0.2, 0.2], 4) == [0, 1, 0, 1]


@given(weights=WEIGHTS, count=st.integers(1, 200))
def test_at_every_position_each_file_is_near_its_share(weights, count):
    order = spread_files_by_weight(weights, count)
    for position in range(1, count + 1):
        counts = Counter(order[:position])
        for file, weight in enumerate(weights):
            assert abs(counts[file] - position * weight / sum(weights)) <= max(1, len(weights) - 1) + 1e-9


def test_every_batch_has_the_shares():
    for epoch in served_mixed(MixedBatches([40, 4], [3, 1], 4, seed=1, shuffle=True), 5):
        assert [sum(row >= 40 for row in batch) for batch in epoch] == [1] * 11


def test_a_small_file_is_passed_through_again_each_time_in_a_new_order():
    """22 rows of the first file in 2 epochs of 11 batches, 22 of the second, which has 2: 11 passes."""
    epochs = served_mixed(MixedBatches([20, 2], [1, 1], 2, seed=3, shuffle=True), 2)
    flat = [row for epoch in epochs for batch in epoch for row in batch]
    small = [row for row in flat if row >= 20]
    passes = [tuple(small[start : start + 2]) for start in range(0, 22, 2)]
    assert all(set(one) == {20, 21} for one in passes)
    assert len(set(passes)) == 2
    large = [row for row in flat if row < 20]
    assert sorted(large[:20]) == list(range(20))
    assert len(large) == 22


def test_without_shuffle_files_keep_their_order_and_go_on_over_epochs():
    epochs = served_mixed(MixedBatches([5, 3], [1, 1], 4, seed=1, shuffle=False), 2)
    assert epochs == [[[0, 5, 1, 6], [2, 7, 3, 5]], [[4, 6, 0, 7], [1, 5, 2, 6]]]


def test_the_order_depends_on_seed_and_weights():
    orders = [
        served_mixed(MixedBatches([30, 30], weights, 6, seed, True), 1)[0]
        for weights, seed in (([1, 1], 1), ([1, 1], 2), ([1, 2], 1))
    ]
    assert orders[0] == served_mixed(MixedBatches([30, 30], [1, 1], 6, 1, True), 1)[0]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.mark.parametrize("taken", range(8))
def test_mixed_files_resume_after_any_number_of_batches(taken):
    def fresh():
        return MixedBatches([5, 3], [1, 3], 3, seed=7, shuffle=True)

    whole = [batch for epoch in served_mixed(fresh(), 4) for batch in epoch]
    first = fresh()
    flow = (batch for _ in range(4) for batch in first)
    begun = [next(flow) for _ in range(taken)]
    second = fresh()
    second.load_state_dict(first.state_after(taken))
    assert begun + [batch for _ in range(4) for batch in second][: 8 - taken] == whole


def test_state_of_another_mixture_is_refused():
    state = MixedBatches([6, 2], [1, 1], 2, 3, True).state_after(1)
    for sizes, weights in (([6, 2], [1, 2]), ([5, 3], [1, 1])):
        with pytest.raises(ValueError, match=r"Restore data.train_files, data.train_weights"):
            MixedBatches(sizes, weights, 2, 3, True).load_state_dict(state)


def test_a_file_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"at least one row left .* got \[4, 0\] rows"):
        MixedBatches([4, 0], [1, 1], 2, 1, True)
