"""A micro-batch is as wide as its longest row, whatever else the rank holds."""

import pickle
import tracemalloc
from collections.abc import Sequence
from functools import partial

import torch
from live_bytes import LiveBytes
from small_models import make_train_batch, ragged, scored
from torch import Tensor

from verl_rc.records.batches import TokenBatch, TrainBatch, positions_mask
from verl_rc.records.ragged import Column, Ragged
from verl_rc.runtime.checkpoint import get_random_state
from verl_rc.runtime.workers.micro_batches import score_sequences, select_sequences
from verl_rc.runtime.workers.trainer_rank import TrainerRank

LENGTHS = [7, 2, 0, 3]
CPU = torch.device("cpu")


def test_rows_are_scored_at_the_width_of_their_micro_batch_and_stand_in_their_places() -> None:
    shapes = []

    def token_ids(tokens: TokenBatch) -> list[Tensor]:
        shapes.append((*tokens.prompts.shape, tokens.responses.shape[1]))
        ids = tokens.responses.float()
        return [ids, torch.stack([ids, -ids], dim=-1)]

    batch = make_train_batch(LENGTHS)
    values, pairs = scored(
        partial(score_sequences, score=token_ids, device=CPU), batch.tokens, [[3, 1], [2], [0], []]
    )
    # Prompts have 1, 2, 3 and 4 tokens; an empty micro-batch runs on row 0.
    assert shapes == [(2, 4, 3), (1, 3, 1), (1, 1, 7), (1, 1, 7)]
    assert torch.equal(values, torch.where(batch.response_mask, batch.tokens.responses, 0).float())
    assert torch.equal(pairs, torch.stack([values, -values], dim=-1))


def test_a_response_of_no_token_in_a_batch_without_any_is_scored_as_nothing() -> None:
    batch = make_train_batch([0, 0])
    tokens = TokenBatch(
        batch.tokens.prompts,
        batch.tokens.prompt_lengths,
        batch.tokens.responses[:, :0],
        batch.tokens.response_lengths,
        batch_size=[2],
    )
    (values,) = score_sequences(ragged(tokens), [[0, 1]], lambda part: [part.responses.float()], CPU)
    assert values.shape == (0,)


def test_rows_are_trained_on_at_the_width_of_their_micro_batch() -> None:
    batch = make_train_batch(LENGTHS)
    part = select_sequences(ragged(batch), [3, 1], CPU)
    assert part.advantages.tolist() == batch.advantages[[3, 1], :3].tolist()
    assert part.tokens.prompts.tolist() == [
        batch.tokens.prompts[3, -4:].tolist(),
        [0, 0, *batch.tokens.prompts[1, -2:].tolist()],
    ]
    nothing = select_sequences(ragged(batch), [], CPU)
    assert nothing.response_mask.shape == (1, 7)
    assert not nothing.response_mask.any()
    assert not nothing.loss_mask.any()


LONGEST = 8192
LONG_SHARE = [LONGEST, *[32] * 63]
GRID_BYTES = 64 * LONGEST * 4
"""One field of the share, padded to its longest row, as float32."""


class ZeroWorker:
    """Scores every token as 0 and trains on nothing."""

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[list[int]]
    ) -> list[Column]:
        return score_sequences(
            tokens, micro_batches, lambda part: [torch.zeros(part.responses.shape)] * 2, CPU
        )

    def update(self, batch: Ragged[TrainBatch], micro_batches: Sequence[list[int]]) -> int:
        return sum(int(select_sequences(batch, rows, CPU).loss_mask.sum()) for rows in micro_batches)


def test_the_memory_of_a_rank_does_not_grow_with_its_longest_row_times_its_rows() -> None:
    lengths = torch.tensor(LONG_SHARE)
    mask = positions_mask(lengths, LONGEST)
    ids, ones, values = torch.ones(64, LONGEST).long(), torch.ones(64).long(), torch.zeros(64, LONGEST)
    tokens = TokenBatch(ids[:, :1], ones, ids, lengths, batch_size=[64])
    batch = TrainBatch(
        tokens=tokens,
        response_mask=mask,
        loss_mask=mask,
        advantages=values,
        old_log_probs=values,
        rollout_log_probs=values.clone(),
        policy_versions=ids,
        scores=values[:, 0],
        batch_size=[64],
    )
    rank = TrainerRank.__new__(TrainerRank)
    rank._workers, rank._random = {"actor": ZeroWorker()}, {"actor": get_random_state()}
    micro_batches = [[0], list(range(1, 64))]
    sent = pickle.dumps((ragged(tokens), ragged(batch)))
    tracemalloc.start()
    try:
        with LiveBytes() as tensors:
            own_tokens, own_batch = pickle.loads(sent)
            columns = rank.call("actor", "compute_log_probs", own_tokens, micro_batches)
            assert rank.call("actor", "update", own_batch, micro_batches) == sum(LONG_SHARE)
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [column.shape for column in columns] == [(sum(LONG_SHARE),)] * 2
    assert tensors.peak + arrays < GRID_BYTES
