"""Batch records refuse wrong shapes and dtypes, index by rows, and survive pickling."""

import pickle

import pytest
import torch

from verl_rc.data.batches import TokenBatch, left_padded, positions_mask, unpadded


def make_tokens(**changes: torch.Tensor) -> TokenBatch:
    fields = {
        "prompts": torch.tensor([[0, 7], [5, 6]]),
        "prompt_lengths": torch.tensor([1, 2]),
        "responses": torch.tensor([[1, 2, 0], [3, 0, 0]]),
        "response_lengths": torch.tensor([2, 1]),
    }
    return TokenBatch(**{**fields, **changes}, batch_size=[2])


def test_lengths_add_up() -> None:
    assert make_tokens().sequence_lengths.tolist() == [3, 3]


def test_rows_can_be_picked_and_pickled() -> None:
    picked = pickle.loads(pickle.dumps(make_tokens()[[1]]))
    assert picked.responses.tolist() == [[3, 0, 0]]


@pytest.mark.parametrize(
    "change", [{"prompt_lengths": torch.tensor([1.0, 2.0])}, {"response_lengths": torch.tensor([[2], [1]])}]
)
def test_wrong_dtype_or_shape_names_the_field(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=rf"TokenBatch\.{next(iter(change))} must be torch\.int64"):
        make_tokens(**change)


def test_padding_falls_off() -> None:
    tokens = make_tokens()
    assert unpadded(tokens.responses, tokens.response_lengths) == [[1, 2], [3]]


def test_positions_mask_and_left_padding() -> None:
    assert positions_mask(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]
    padded, lengths = left_padded([[4], [5, 6]], pad_token_id=9)
    assert padded.tolist() == [[9, 4], [5, 6]]
    assert lengths.tolist() == [1, 2]
