"""Records without padding: nothing but padding is lost, and one tensor travels once."""

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from ragged_rows import ragged
from small_models import make_train_batch

from verl_rc.records.batches import FIELDS, CriticBatch, TokenBatch, TrainBatch
from verl_rc.records.pictures import Pictures
from verl_rc.records.ragged import rows_of

LENGTHS = [7, 2, 5, 0, 1, 6]
PICTURES = Pictures([b"one"]), Pictures([b"two", b"three"])
ROWS = [4, 3, 1]
"""Of prompts of 5, 4 and 2 tokens and responses of 1, 0 and 2."""


def arrived_rows(record: Any) -> Any:
    """``ROWS`` of the record after the way through another process, where they are three of four."""
    return pickle.loads(pickle.dumps(ragged(record, [3, 0, 1, 4]))).padded([3, 0, 2])


def full_batch() -> TrainBatch:
    """A batch with a value in every field, and none of it on padding."""
    batch = make_train_batch(LENGTHS)
    mask = batch.response_mask
    batch.reference_log_probs = torch.where(mask, -1.25, 0.0)
    batch.teacher_log_probs = torch.where(mask, -1.5, 0.0)
    batch.teacher_top_ids = mask[..., None] * torch.arange(1, 4, dtype=torch.int32)
    batch.teacher_top_log_probs = mask[..., None] * torch.randn(6, 7, 3)
    batch.policy_versions = torch.where(mask, 3, 0)
    batch.scores = torch.arange(6.0)
    batch.engines = torch.arange(6) % 2
    batch.tokens.pictures = torch.tensor([PICTURES[row % 2].number for row in range(6)])
    batch.finished = torch.arange(6) % 2 == 0
    batch.tokens.restarts = mask & (torch.arange(7) % 2 == 1)
    batch.tokens.support_counts = torch.where(mask, torch.arange(7) % 3, 0)
    sizes = batch.tokens.support_counts.sum(-1, keepdim=True)
    ids = torch.arange(42, dtype=torch.int32).view(6, 7)
    batch.tokens.support_ids = torch.where(torch.arange(7) < sizes, ids, 0)
    batch.tokens.experts_counts = batch.tokens.support_counts.roll(1, dims=0) * (mask > 0)
    sizes = batch.tokens.experts_counts.sum(-1, keepdim=True)
    batch.tokens.experts_ids = torch.where(torch.arange(7) < sizes, ids + 200, 0).to(torch.uint8)
    batch.tokens.head_counts = 2 * batch.tokens.support_counts
    sizes = batch.tokens.head_counts.sum(-1, keepdim=True)
    batch.tokens.head_ids = torch.where(torch.arange(14) < sizes, torch.arange(14, dtype=torch.int32), 0)
    return batch


def by_field(record: Any) -> dict[str, torch.Tensor]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name in FIELDS}


def test_rows_arrive_to_the_bit_and_padded_to_the_longest_of_them() -> None:
    batch = full_batch()
    arrived = arrived_rows(batch)
    assert isinstance(arrived, TrainBatch)
    assert (arrived.tokens.prompts.shape, arrived.tokens.responses.shape) == ((3, 5), (3, 2))
    for name, values in (by_field(arrived.tokens) | by_field(arrived)).items():
        sent = (by_field(batch.tokens) | by_field(batch))[name]
        assert values.dtype == sent.dtype
        for place, row in enumerate(ROWS):
            prompt, response = int(batch.tokens.prompt_lengths[row]), LENGTHS[row]
            support, experts, head = (
                int(counts[row].sum())
                for counts in (
                    batch.tokens.support_counts,
                    batch.tokens.experts_counts,
                    batch.tokens.head_counts,
                )
            )
            where, whence = {
                "B": (slice(None), slice(None)),
                "BP": (slice(5 - prompt, 5), slice(sent.shape[-1] - prompt, sent.shape[-1])),
                "BR": (slice(0, response), slice(0, response)),
                "BRW": (slice(0, 3 * response), slice(0, 3 * response)),
                "BK": (slice(0, support), slice(0, support)),
                "BE": (slice(0, experts), slice(0, experts)),
                "BH": (slice(0, head), slice(0, head)),
            }[FIELDS[name][1]]
            assert (values[place].reshape(-1)[where] == sent[row].reshape(-1)[whence]).all(), name
    assert not arrived.response_mask[1].any()
    assert arrived.tokens.prompts[2].tolist()[:3] == [0, 0, 0]


def test_a_batch_of_tokens_and_one_of_the_critic_keep_their_kind_and_missing_fields_stay_missing() -> None:
    batch = full_batch()
    assert isinstance(arrived_rows(batch.tokens), TokenBatch)
    values = batch.advantages
    critic = CriticBatch(batch.tokens, batch.response_mask, values, values, batch_size=[6])
    assert isinstance(arrived_rows(critic), CriticBatch)
    batch.engines = batch.tokens.restarts = None
    found = arrived_rows(batch)
    assert found.engines is found.tokens.restarts is None


@pytest.mark.parametrize("count", [1, 4])
def test_values_of_another_number_of_tokens_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"a column must have 3 values, one a token, got {count}"):
        rows_of(np.zeros(count, dtype=np.float32), np.array([0, 3]))


def test_rows_without_a_response_are_one_token_wide() -> None:
    tokens = arrived_rows(make_train_batch([3, 0, 2, 0, 0, 1]).tokens)
    assert (tokens.responses.shape, tokens.response_lengths.tolist()) == ((3, 1), [0, 0, 0])


@pytest.mark.parametrize("longest", [100, 8000])
def test_padding_does_not_travel_and_a_tensor_that_is_two_fields_travels_once(longest: int) -> None:
    """An id of four bytes, a mask of one and a log-prob of four for every token; the row's length and its
    prompt's in eight bytes each."""
    lengths = torch.tensor([longest, *[10] * 63])
    mask = torch.arange(longest) < lengths[:, None]
    prompts, responses = torch.ones(64, 4, dtype=torch.int64), torch.ones(64, longest, dtype=torch.int64)
    tokens = TokenBatch(prompts, torch.full((64,), 4), responses, lengths, batch_size=[64])
    values = torch.zeros(64, longest)
    versions, scores = torch.where(mask, 0, -1), torch.zeros(64)
    batch = TrainBatch(tokens, mask, mask, values, values, values, versions, scores, values, batch_size=[64])
    size = len(pickle.dumps(ragged(batch)))
    content = 13 * int(lengths.sum()) + 64 * (4 * 4 + 2 * 8 + 4)
    assert content < size < content + 2000
