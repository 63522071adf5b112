"""The most likely tokens that vLLM reports beside each sampled one."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_rc.records.heads import head_column
from verl_rc.records.ragged_column import RaggedColumn

SUM_TOLERANCE = 1e-3
"""Largest distance from 1 of a sum of probabilities that rounding explains."""


@dataclass(frozen=True)
class ReportedTokens:
    """The n most likely tokens at each of T positions, by rank."""

    ids: np.ndarray[Any, Any]
    """int32 ``[T, n]``."""
    log_probs: np.ndarray[Any, Any]
    """``[T, n]``, nats; -inf for a token that a filter has removed."""
    sampled_log_probs: np.ndarray[Any, Any]
    """``[T]``, nats."""

    @classmethod
    def from_output(cls, token_ids: Any, reported: Any, number: int, num_top_tokens: int) -> "ReportedTokens":
        """From vLLM's ``FlatLogprobs``: at each position the sampled token, then the most likely ones.

        Raises ``RuntimeError`` when it reports another number of tokens; ``number`` is of the sample.
        """
        shape = len(token_ids), num_top_tokens + 1
        if len(reported.token_ids) != shape[0] * shape[1]:
            raise RuntimeError(
                f"each of the {shape[0]} tokens of request {number} must come with {num_top_tokens} likely "
                f"ones, the engine returned {len(reported.token_ids)} tokens in all."
            )
        log_probs = np.array(reported.logprobs).reshape(shape)
        ids = np.array(reported.token_ids, dtype=np.int32).reshape(shape)
        return cls(ids[:, 1:], log_probs[:, 1:], log_probs[:, 0])

    def heads(self, size: int, number: int) -> RaggedColumn:
        """The ``size`` most likely tokens of each place.

        Raises ``RuntimeError`` when their probabilities sum to more than 1.
        """
        log_probs = self.log_probs[:, :size]
        masses = np.exp(log_probs).sum(axis=1)
        if (masses > 1 + SUM_TOLERANCE).any():
            position = int(masses.argmax())
            raise RuntimeError(
                f"the probabilities of the {size} most likely tokens must sum to at most 1, but those at "
                f"position {position} of request {number} sum to {masses[position]:.4f}. This vLLM reports "
                "other log-probs: drop algorithm.rollout_correction.score_centering."
            )
        return head_column(self.ids[:, :size], log_probs)
