"""Mini-batches: every row once per epoch, with counts taken over the whole mini-batch."""

from functools import partial

import pytest
import torch

from verl_rc.algorithm.ppo.mini_batches import plan_mini_batches


def make_counts(
    response_lengths: list[int], rejected_rows: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each row, and those of them that are kept."""
    response_tokens = torch.tensor(response_lengths)
    loss_tokens = response_tokens.clone()
    loss_tokens[list(rejected_rows)] = 0
    return response_tokens, loss_tokens


def test_counts_of_the_original_denominator_ignore_rejection() -> None:
    counts = make_counts([4, 2, 0, 1], rejected_rows=(0,))
    first, second = plan_mini_batches(*counts, rows_per_mini_batch=2, epochs=1, shuffle=False, seed=0)
    assert (first.rows, first.num_tokens, first.num_sequences, first.num_loss_tokens) == ([0, 1], 6, 2, 2)
    assert (second.rows, second.num_tokens, second.num_sequences, second.num_loss_tokens) == ([2, 3], 1, 1, 1)


def test_counts_of_the_kept_denominator_follow_rejection() -> None:
    counts = make_counts([4, 2, 0, 1], rejected_rows=(0, 3))
    first, second = plan_mini_batches(
        *counts, rows_per_mini_batch=2, epochs=1, shuffle=False, seed=0, denominator="kept"
    )
    assert (first.num_tokens, first.num_sequences) == (2, 1)
    assert (second.num_tokens, second.num_sequences, second.num_loss_tokens) == (0, 0, 0)


def test_shuffling_uses_every_row_once_per_epoch_and_repeats_with_the_seed() -> None:
    cut = partial(plan_mini_batches, rows_per_mini_batch=2, epochs=3, shuffle=True, seed=5)
    plan = cut(*make_counts([1] * 8))
    for epoch in range(3):
        rows = sorted(row for mini in plan[4 * epoch : 4 * epoch + 4] for row in mini.rows)
        assert rows == list(range(8))
    assert plan == cut(*make_counts([1] * 8))
    assert plan[:4] != plan[4:8]


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 3 rows"):
        plan_mini_batches(*make_counts([1] * 4), rows_per_mini_batch=3, epochs=1, shuffle=False, seed=0)
