"""A micro-batch is as wide as its longest row, whatever else the rank holds."""

import torch
from small_models import make_train_batch
from torch import Tensor

from verl_rc.records.batches import TokenBatch
from verl_rc.runtime.workers.micro_batches import score_sequences, select_sequences

LENGTHS = [7, 2, 0, 3]
CPU = torch.device("cpu")


def test_rows_are_scored_at_the_width_of_their_micro_batch_and_stand_in_their_places() -> None:
    shapes = []

    def token_ids(tokens: TokenBatch) -> list[Tensor]:
        shapes.append((*tokens.prompts.shape, tokens.responses.shape[1]))
        ids = tokens.responses.float()
        return [ids, torch.stack([ids, -ids], dim=-1)]

    batch = make_train_batch(LENGTHS)
    values, pairs = score_sequences(batch.tokens, [[3, 1], [2], [0], []], token_ids, CPU)
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
    (values,) = score_sequences(tokens, [[0, 1]], lambda part: [part.responses.float()], CPU)
    assert values.shape == (2, 0)


def test_rows_are_trained_on_at_the_width_of_their_micro_batch() -> None:
    batch = make_train_batch(LENGTHS)
    part = select_sequences(batch, [3, 1], CPU)
    assert part.advantages.tolist() == batch.advantages[[3, 1], :3].tolist()
    assert part.tokens.prompts.tolist() == [
        batch.tokens.prompts[3, -4:].tolist(),
        [0, 0, *batch.tokens.prompts[1, -2:].tolist()],
    ]
    nothing = select_sequences(batch, [], CPU)
    assert nothing.response_mask.shape == (1, 7)
    assert not nothing.response_mask.any()
    assert not nothing.loss_mask.any()
