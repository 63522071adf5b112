"""Batch records refuse wrong shapes and dtypes and survive pickling."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from verl_rc.records.batches import (
    FIELDS,
    CriticBatch,
    PolicyEvaluations,
    RolloutBatch,
    TokenBatch,
    TokenScores,
    TrainBatch,
    left_padded,
    positions_mask,
)


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


def test_positions_mask_and_left_padding() -> None:
    assert positions_mask(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]
    padded, lengths = left_padded([[4], [5, 6]], pad_token_id=9)
    assert padded.tolist() == [[9, 4], [5, 6]]
    assert lengths.tolist() == [1, 2]


ROWS, WIDTH = 2, 3
WRONG = {
    torch.int64: torch.int32,
    torch.int32: torch.int64,
    torch.bool: torch.int64,
    torch.float32: torch.float64,
}
RECORDS = (RolloutBatch, PolicyEvaluations, TrainBatch, CriticBatch, TokenScores)


def sound_fields(record: type) -> dict[str, Any]:
    """A value for every field of a record."""
    shapes = {
        "B": (ROWS,),
        "BR": (ROWS, WIDTH),
        "BP": (ROWS, 2),
        "BRW": (ROWS, WIDTH, 4),
        "BRC": (ROWS, WIDTH, 5),
    }
    names = [one.name for one in dataclasses.fields(record) if one.name != "tokens"]
    fields: dict[str, Any] = {
        name: torch.zeros(shapes[FIELDS[name][1]], dtype=FIELDS[name][0]) for name in names
    }
    if len(names) < len(dataclasses.fields(record)):
        fields["tokens"] = make_tokens()
    return fields if record is TokenScores else {**fields, "batch_size": [ROWS]}


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_of_every_record_is_checked(record: type) -> None:
    fields = sound_fields(record)
    record(**fields)
    checked = [name for name in fields if name not in ("tokens", "batch_size")]
    assert len(checked) > 2
    for name in checked:
        dtype, symbols = FIELDS[name]
        shape = fields[name].shape
        for wrong in (
            torch.zeros(shape, dtype=WRONG[dtype]),
            torch.zeros((*shape, 1), dtype=dtype),
        ):
            with pytest.raises(ValueError, match=rf"{record.__name__}\.{name} must be {dtype} of shape"):
                record(**{**fields, name: wrong})
        if symbols == "BR" and "tokens" in fields:
            with pytest.raises(
                ValueError,
                match=rf"{record.__name__}\.{name} must be {dtype} of shape \[2, 3\], got .*\[2, 4\]",
            ):
                record(**{**fields, name: torch.zeros(ROWS, WIDTH + 1, dtype=dtype)})


def test_fields_of_different_widths_do_not_go_together() -> None:
    with pytest.raises(
        ValueError, match=r"TokenScores\.entropies must be torch\.float32 of shape \[2, 3\], got .*\[2, 4\]"
    ):
        TokenScores(torch.zeros(2, 3), torch.zeros(2, 4))
