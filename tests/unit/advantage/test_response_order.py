"""Packing of response tokens and the discounted sums over them."""

import pytest
import torch

from verl_rc.advantage.response_order import ResponseOrder, discounted_suffix_sums, in_row_blocks

MASK = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
NUMBERS = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])


def test_pack_moves_response_tokens_left_and_unpack_moves_them_back() -> None:
    order = ResponseOrder.from_mask(MASK)
    packed = order.pack(NUMBERS)
    assert packed.tolist() == [[2.0, 8.0, 16.0, 0.0, 0.0, 0.0], [0.0] * 6]
    assert order.unpack(packed).tolist() == [[0.0, 2.0, 0.0, 8.0, 16.0, 0.0], [0.0] * 6]


def test_rewards_outside_the_response_go_to_the_token_before_or_the_first() -> None:
    packed = ResponseOrder.from_mask(MASK).pack_rewards(NUMBERS)
    assert packed[0].tolist() == [1.0 + 2.0 + 4.0, 8.0, 16.0 + 32.0, 0.0, 0.0, 0.0]
    spoiled = NUMBERS.masked_fill(~MASK, torch.inf)
    assert ResponseOrder.from_mask(MASK).pack_rewards(spoiled)[0].tolist() == [2.0, 8.0, 16.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 127, 128, 4097])
def test_suffix_sums_equal_a_loop(length: int, discount: float) -> None:
    terms = torch.randn(2, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    expected, following = torch.zeros_like(terms), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        following = terms[:, t] + discount * following
        expected[:, t] = following
    torch.testing.assert_close(discounted_suffix_sums(terms, discount), expected)


def test_no_positions_and_no_rows() -> None:
    assert discounted_suffix_sums(torch.zeros(2, 0), 0.5).shape == (2, 0)
    assert discounted_suffix_sums(torch.zeros(0, 3), 0.5).shape == (0, 3)


def test_row_blocks_keep_the_order_of_rows() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(in_row_blocks(lambda a, b: a + b, rows, rows), 2 * rows)
    wide = torch.zeros(3, 2**18)
    wide[:, 0] = torch.arange(3.0)
    seen = []

    def note(block: torch.Tensor) -> torch.Tensor:
        seen.append(block.shape[0])
        return block + 1

    assert torch.equal(in_row_blocks(note, wide), wide + 1)
    assert seen == [1, 1, 1]
