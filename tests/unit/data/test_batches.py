"""Batch records refuse wrong shapes and dtypes and survive pickling; every change of a row's tokens changes
its fingerprint."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rc.data.batches import (
    FIELDS,
    CriticBatch,
    PolicyEvaluations,
    RolloutBatch,
    TokenBatch,
    TokensChangedError,
    TokenScores,
    TrainBatch,
    fingerprints,
    left_padded,
    positions_mask,
    require_sampled_tokens,
    unpadded,
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


def test_padding_falls_off() -> None:
    tokens = make_tokens()
    assert unpadded(tokens.responses, tokens.response_lengths) == [[1, 2], [3]]


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


Row = tuple[list[int], list[int], list[bool]]
ROW = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4),
).map(lambda pair: (pair[0], [token for token, _ in pair[1]], [sampled for _, sampled in pair[1]]))


def batch(rows: list[Row], further_padding: int = 0, pad: int = 0) -> tuple[TokenBatch, torch.Tensor]:
    prompts, prompt_lengths = left_padded([row[0] for row in rows], pad)
    width = max(len(row[1]) for row in rows) + further_padding
    responses = (
        torch.tensor([row[1] + [pad] * (width - len(row[1])) for row in rows])
        .long()
        .reshape(len(rows), width)
    )
    mask = (
        torch.tensor([row[2] + [False] * (width - len(row[2])) for row in rows])
        .bool()
        .reshape(len(rows), width)
    )
    more = torch.full((len(rows), further_padding), pad)
    tokens = TokenBatch(
        prompts=torch.cat([more, prompts], dim=1),
        prompt_lengths=prompt_lengths,
        responses=responses,
        response_lengths=torch.tensor([len(row[1]) for row in rows]),
        batch_size=[len(rows)],
    )
    return tokens, mask


@settings(deadline=None, max_examples=50)
@given(st.lists(ROW, min_size=2, max_size=6))
def test_equal_exactly_when_the_rows_are(rows: list[Row]) -> None:
    numbers = fingerprints(*batch(rows)).tolist()
    for a, row_a in enumerate(rows):
        for b, row_b in enumerate(rows):
            assert (numbers[a] == numbers[b]) == (row_a == row_b)


@settings(deadline=None, max_examples=50)
@given(st.lists(ROW, min_size=1, max_size=4), st.integers(0, 3))
def test_padding_and_the_other_rows_do_not_matter(rows: list[Row], further: int) -> None:
    alone = [fingerprints(*batch([row], pad=3))[0] for row in rows]
    assert fingerprints(*batch(rows, further)).tolist() == torch.stack(alone).tolist()


def sampled() -> tuple[TokenBatch, torch.Tensor]:
    tokens, mask = batch(
        [([1, 2], [3, 4, 5], [True, False, True]), ([1], [3], [True]), ([7, 8, 9], [4, 4], [True, True])]
    )
    tokens.experts_counts = torch.tensor([[2, 0, 1], [1, 0, 0], [0, 1, 0]])
    tokens.experts_ids = torch.tensor([[5, 6, 7], [5, 0, 0], [9, 0, 0]], dtype=torch.uint8)
    return tokens, mask


def test_what_was_sampled_passes_whatever_is_on_padding() -> None:
    tokens, mask = sampled()
    expected = fingerprints(tokens, mask)
    tokens.responses[1, 2] = tokens.experts_ids[1, 2] = 3
    require_sampled_tokens(expected, tokens, mask)


@pytest.mark.parametrize(
    "fault",
    [
        "a token",
        "a tool token",
        "a prompt token",
        "the mask",
        "the length",
        "the order",
        "an expert",
        "its token",
    ],
)
def test_every_fault_names_its_rows(fault: str) -> None:
    tokens, mask = sampled()
    expected = fingerprints(tokens, mask)
    rows = [0]
    if fault == "a token":
        tokens.responses[0, 2] = 6
    elif fault == "a tool token":
        tokens.responses[0, 1] = 0
    elif fault == "a prompt token":
        tokens.prompts[0, -1] = 1
    elif fault == "the mask":
        mask = positions_mask(tokens.response_lengths, 3)
    elif fault == "the length":
        tokens.response_lengths[0] = 2
    elif fault == "an expert":
        tokens.experts_ids[0, 1] = 7
    elif fault == "its token":
        tokens.experts_counts[0] = torch.tensor([1, 1, 1])
    else:
        tokens, mask, rows = tokens[[1, 0, 2]], mask[[1, 0, 2]], [0, 1]
    with pytest.raises(TokensChangedError) as caught:
        require_sampled_tokens(expected, tokens, mask)
    assert f"{len(rows)} of 3 rows" in str(caught.value)
    assert f"{rows}." in str(caught.value)
