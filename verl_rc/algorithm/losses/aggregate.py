"""Reducing one loss per token to one number: sums divided by denominators that are handed in, and reported
means."""

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from verl_rc.config.algorithms import LossAggregation
from verl_rc.metrics.mergeable import Mean
from verl_rc.tensor_ops import masked_sum

Count = float | Tensor

AGGREGATION_MODES: tuple[LossAggregation, ...] = get_args(LossAggregation)


@dataclass(frozen=True)
class Aggregation:
    """A mode of averaging token losses together with its denominators.

    The counts are those of everything the gradient step sees: the mini-batch over all data-parallel ranks.
    Left at None they are counted in the tensors given, which is right only when these hold the whole
    mini-batch.

    With l the losses, m the mask, d the denominator mask, N the tokens and S the sequences of the whole
    mini-batch:

    - ``token-mean``: Σ m l / N (DAPO, arXiv:2503.14476)
    - ``token-sum``: Σ m l
    - ``seq-mean-token-sum``: Σ m l / S
    - ``seq-mean-token-mean``: Σ_sequences (Σ_t m l / Σ_t d) / S (GRPO, arXiv:2402.03300)
    - ``seq-mean-token-sum-norm``: Σ m l / (S · loss_scale_factor) (Dr. GRPO, arXiv:2503.20783)
    """

    mode: LossAggregation
    """One of ``AGGREGATION_MODES`` (``actor_rollout_ref.actor.loss_agg_mode``)."""
    num_tokens: Count | None = None
    """N, > 0; Σ d when None."""
    num_sequences: Count | None = None
    """S, sequences with at least one token, > 0; those with Σ_t d > 0 when None."""
    loss_scale_factor: float | None = None
    """Constant divisor of ``seq-mean-token-sum-norm``, in tokens, > 0; the padded width T when None."""

    def __post_init__(self) -> None:
        """Refuse a mode that does not exist."""
        if self.mode not in AGGREGATION_MODES:
            raise ValueError(
                "the aggregation mode (actor_rollout_ref.actor.loss_agg_mode) must be one of "
                f"{', '.join(AGGREGATION_MODES)}; got {self.mode!r}"
            )

    @classmethod
    def from_name(cls, aggregation: "LossAggregation | Aggregation") -> "Aggregation":
        """Accept a mode's name where a record is expected."""
        return aggregation if isinstance(aggregation, Aggregation) else cls(mode=aggregation)

    def with_mode(self, mode: LossAggregation) -> "Aggregation":
        """Return the same denominators under another mode, for losses that define their own average."""
        return replace(self, mode=mode)

    def reduce(self, token_loss: Tensor, mask: Tensor, denominator_mask: Tensor | None = None) -> Tensor:
        """Average token losses; micro-batches that share the denominators add up to the loss of their union.

        The caller averages over ranks: where the gradients of D ranks are averaged, multiply by D. Tokens
        outside the mask are cut, so that NaN there is harmless; with nothing in the mask the result is a zero
        that is still attached to the graph. A denominator of 0 counts as 1.

        Args:
            token_loss: [B, T], in the loss's unit.
            mask: [B, T], bool or 0/1; tokens that contribute.
            denominator_mask: [B, T]; tokens that are counted in the denominators, ``mask`` when None. Handing
                in the mask from before rejection keeps a kept token's gradient independent of how many others
                were rejected.

        Returns:
            The loss, 0-d, at least float32.

        Raises:
            ValueError: for tensors that are not [B, T] of one shape.
        """
        # Two masks: if rejected tokens left the denominator too, every kept token would get a larger
        # gradient.
        denominator = mask if denominator_mask is None else denominator_mask
        if token_loss.ndim != 2 or token_loss.shape != mask.shape or denominator.shape != mask.shape:
            raise ValueError(
                "token_loss, mask and denominator_mask must be [B, T] of one shape; got "
                f"{tuple(token_loss.shape)}, {tuple(mask.shape)} and {tuple(denominator.shape)}"
            )
        # Cut by where, not by a product: 0 * NaN is NaN, and padding would poison the sum. A sum in bfloat16
        # would come back rounded to 8 significant bits.
        token_loss = token_loss.where(mask.bool(), 0).to(torch.promote_types(token_loss.dtype, torch.float32))
        denominator = denominator.bool()
        if self.mode == "token-sum":
            return token_loss.sum()
        if self.mode == "token-mean":
            return token_loss.sum() / _positive(
                denominator.sum() if self.num_tokens is None else self.num_tokens, token_loss
            )
        sequence_tokens = denominator.sum(dim=-1)
        # Divided sequence by sequence before the sum: a short answer weighs as much as a long one (GRPO).
        if self.mode == "seq-mean-token-mean":
            token_loss = token_loss / sequence_tokens.clamp(min=1).unsqueeze(-1)
        # One constant for all sequences: their own length as divisor gives tokens of long wrong answers a
        # smaller penalty (the length bias that Dr. GRPO removes).
        if self.mode == "seq-mean-token-sum-norm":
            factor = self.loss_scale_factor
            token_loss = token_loss / (token_loss.shape[-1] if factor is None else factor)
        # Padding sequences have no tokens; in the denominator they would shrink the loss.
        sequences = sequence_tokens.count_nonzero() if self.num_sequences is None else self.num_sequences
        return token_loss.sum() / _positive(sequences, token_loss)


def aggregate_loss(
    token_loss: Tensor,
    mask: Tensor,
    mode: LossAggregation,
    denominator_mask: Tensor | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """``Aggregation.reduce`` for those who have no record: a notebook, another trainer.

    Arguments, result (0-d) and errors are those of ``Aggregation`` and its ``reduce``.
    """
    aggregation = Aggregation(mode, num_tokens, num_sequences, loss_scale_factor)
    return aggregation.reduce(token_loss, mask, denominator_mask)


def _positive(count: Count, like: Tensor) -> Tensor:
    """Turn a count into a divisor; an empty mini-batch divides its zero by one."""
    # A tensor comparison: in Python, `if count` would make the host wait for a count on a device.
    divisor = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    return divisor.where(divisor > 0, torch.ones_like(divisor))


def token_mean(values: Tensor, mask: Tensor) -> Mean[Tensor]:
    """The mean of ``values`` over the tokens in ``mask``, as two 0-d sums in float64, detached.

    Args:
        values: [B, T], any unit; booleans count as 0 and 1.
        mask: [B, T] bool.
    """
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    # float64, so that it does not matter how a mini-batch is cut: float32 holds whole numbers only up to
    # 2**24, and partial sums are added over all micro-batches and ranks.
    return Mean(masked_sum(values, mask).to(torch.float64), mask.sum().to(torch.float64))
