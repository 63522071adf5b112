"""The order of rows: complete, seeded, new in every epoch, and the same after a resume at any point."""

import pytest

from verl_rc.data.epoch_batches import EpochBatches


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
    second.load_state_dict(first.state_dict())
    assert (second.epoch, second.position) == divmod(taken, 3)
    rest = [batch for _ in range(4) for batch in second][: 12 - taken]
    assert begun + rest == whole


def test_state_of_other_data_is_refused():
    state = EpochBatches(7, 2, 3, True).state_dict()
    for other in (EpochBatches(8, 2, 3, True), EpochBatches(7, 3, 3, True), EpochBatches(7, 2, 4, True)):
        with pytest.raises(ValueError, match="a resumed run must read the data it was started with"):
            other.load_state_dict(state)


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ValueError, match="at least one batch of 4 rows, got 3"):
        EpochBatches(3, 4, 0, True)
