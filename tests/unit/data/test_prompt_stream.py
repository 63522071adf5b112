"""Batches in the loader's order, the epoch each belongs to, and a position that resumes between any two of them."""

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_rc.data.dataset import PromptStream
from verl_rc.data.epoch_batches import EpochBatches

ROWS, SIZE = 7, 2
BATCHES_PER_EPOCH = 3


def make_stream() -> PromptStream:
    order = EpochBatches(ROWS, SIZE, seed=3, shuffle=True)
    return PromptStream(StatefulDataLoader(list(range(ROWS)), batch_sampler=order, collate_fn=list))  # type: ignore[arg-type]


def test_an_epoch_serves_every_row_once_and_the_next_one_follows() -> None:
    stream = make_stream()
    assert len(stream) == BATCHES_PER_EPOCH
    drawn = [stream.draw() for _ in range(3 * BATCHES_PER_EPOCH)]
    assert [epoch for epoch, _ in drawn] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    orders = []
    for epoch in range(3):
        rows = [row for number, batch in drawn if number == epoch for row in batch]
        assert len(set(rows)) == BATCHES_PER_EPOCH * SIZE
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("drawn_before", range(8))
def test_a_resumed_stream_goes_on_with_the_next_batch(drawn_before: int) -> None:
    whole = make_stream()
    expected = [whole.draw() for _ in range(10)]
    first = make_stream()
    for _ in range(drawn_before):
        first.draw()
    second = make_stream()
    second.load_state_dict(first.state_dict())
    assert [second.draw() for _ in range(10 - drawn_before)] == expected[drawn_before:]


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold batches_drawn and loader"):
        make_stream().load_state_dict({"position": 3})
