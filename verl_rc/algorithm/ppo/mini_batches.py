"""Cutting a train batch into optimizer mini-batches, each with the denominators its losses are divided by."""

import random
from dataclasses import dataclass

from torch import Tensor

from verl_rc.config.rollout_correction import RejectionDenominator


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step, or a rank's part of them, and the counts of all of them over all
    ranks."""

    micro_batches: list[list[int]]
    """Row numbers of each forward and backward: one with all rows before ranks share them. Every rank has the
    same number of micro-batches; an empty one contributes nothing."""
    num_tokens: int
    """Tokens in the denominator mask: token-mean divides by it."""
    num_sequences: int
    """Rows with at least one token in the denominator mask: the seq-mean modes divide by it."""
    num_loss_tokens: int
    """Tokens that contribute to a loss; 0 skips the optimizer step."""

    @property
    def rows(self) -> list[int]:
        """The row numbers of all micro-batches, one after the other."""
        return [row for rows in self.micro_batches for row in rows]


def plan_mini_batches(
    response_tokens: Tensor,
    loss_tokens: Tensor,
    *,
    rows_per_mini_batch: int,
    epochs: int,
    shuffle: bool,
    seed: int,
    denominator: RejectionDenominator = "original",
) -> list[MiniBatch]:
    """Mini-batches of all epochs, in the order they are trained on.

    Counts are taken here, over the whole mini-batch, so that micro-batches and ranks cannot change what a
    loss is divided by. Raises ``ValueError`` when the rows do not divide into mini-batches.

    Args:
        response_tokens: int ``[B]``, response tokens of each row.
        loss_tokens: int ``[B]``, those that rollout correction kept.
        rows_per_mini_batch: ``ppo_mini_batch_size`` prompts times samples per prompt.
        epochs: Passes over the train batch.
        shuffle: Draw a new order of rows in each pass.
        seed: Seed of that order.
        denominator: ``original``: all response tokens count; ``kept``: only the latter.
    """
    num_rows = len(response_tokens)
    if num_rows % rows_per_mini_batch:
        raise ValueError(
            f"a train batch must hold a multiple of {rows_per_mini_batch} rows (mini-batch size x samples), "
            f"got {num_rows}."
        )
    denominator_tokens = loss_tokens if denominator == "kept" else response_tokens
    order = random.Random(seed)
    plan = []
    for _ in range(epochs):
        rows = list(range(num_rows))
        if shuffle:
            order.shuffle(rows)
        for start in range(0, num_rows, rows_per_mini_batch):
            batch_rows = sorted(rows[start : start + rows_per_mini_batch])
            tokens = denominator_tokens[batch_rows]
            num_loss_tokens = int(loss_tokens[batch_rows].sum())
            plan.append(MiniBatch([batch_rows], int(tokens.sum()), int((tokens > 0).sum()), num_loss_tokens))
    return plan
