"""Every change of a row's tokens changes its fingerprint."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import ragged

from verl_rc.records.batches import TokenBatch, left_padded, positions_mask
from verl_rc.records.fingerprints import TokensChangedError, fingerprints, require_sampled_tokens
from verl_rc.records.ragged import Ragged

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


def rows_of_step(tokens: TokenBatch, mask: torch.Tensor) -> Ragged[TokenBatch]:
    rows = ragged(tokens)
    real = mask[positions_mask(tokens.response_lengths, mask.shape[1])]
    return replace(rows, columns={**rows.columns, "response_mask": real.numpy()})


def prints(tokens: TokenBatch, mask: torch.Tensor) -> torch.Tensor:
    return fingerprints(rows_of_step(tokens, mask))


@settings(deadline=None, max_examples=50)
@given(st.lists(ROW, min_size=2, max_size=6))
def test_equal_exactly_when_the_rows_are(rows: list[Row]) -> None:
    numbers = prints(*batch(rows)).tolist()
    for a, row_a in enumerate(rows):
        for b, row_b in enumerate(rows):
            assert (numbers[a] == numbers[b]) == (row_a == row_b)


@settings(deadline=None, max_examples=50)
@given(st.lists(ROW, min_size=1, max_size=4), st.integers(0, 3))
def test_padding_and_the_other_rows_do_not_matter(rows: list[Row], further: int) -> None:
    alone = [prints(*batch([row], pad=3))[0] for row in rows]
    assert prints(*batch(rows, further)).tolist() == torch.stack(alone).tolist()


def sampled() -> tuple[TokenBatch, torch.Tensor]:
    tokens, mask = batch(
        [([1, 2], [3, 4, 5], [True, False, True]), ([1], [3], [True]), ([7, 8, 9], [4, 4], [True, True])]
    )
    tokens.experts_counts = torch.tensor([[2, 0, 1], [1, 0, 0], [0, 1, 0]])
    tokens.experts_ids = torch.tensor([[5, 6, 7], [5, 0, 0], [9, 0, 0]], dtype=torch.uint8)
    return tokens, mask


def test_what_was_sampled_passes_whatever_is_on_padding() -> None:
    tokens, mask = sampled()
    expected = prints(tokens, mask)
    tokens.responses[1, 2] = tokens.experts_ids[1, 2] = 3
    require_sampled_tokens(expected, rows_of_step(tokens, mask))


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
    expected = prints(tokens, mask)
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
        require_sampled_tokens(expected, rows_of_step(tokens, mask))
    assert f"{len(rows)} of 3 rows" in str(caught.value)
    assert f"{rows}." in str(caught.value)
