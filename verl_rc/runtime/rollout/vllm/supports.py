"""The support of each sampled token, the tokens that vLLM's filters left, from the log-probs that vLLM
reports.

The processed log-prob of a token that top_p, top_k or min_p has removed is -inf. So the support is the
tokens with a finite log-prob, if vLLM reports enough of the most likely tokens.
"""

from typing import Any

import numpy as np

from verl_rc.records.ragged_column import RaggedColumn

_SUM_TOLERANCE = 1e-3
"""Largest distance from 1 of the sum of a support's probabilities."""


def supports(
    token_ids: Any, reported: Any, number: int, num_top_tokens: int, vocabulary_size: int
) -> RaggedColumn:
    """The support of each of ``token_ids``; no tokens where it is larger than ``num_top_tokens``, or the
    sampled token has no finite log-prob.

    Args:
        token_ids: Sampled tokens of one request.
        reported: vLLM's ``FlatLogprobs``: at each position the sampled token, then the most likely ones.
        number: Of the sample, for messages.
        num_top_tokens: Most likely tokens that vLLM reports at each position, at most the vocabulary.
        vocabulary_size: Number of tokens.

    Raises ``RuntimeError`` when the reported tokens are not the sets that vLLM sampled from.
    """
    shape = len(token_ids), num_top_tokens + 1
    if len(reported.token_ids) != shape[0] * shape[1]:
        raise RuntimeError(
            f"each of the {shape[0]} tokens of request {number} must come with {num_top_tokens} likely ones, "
            f"which show the filter's set, the engine returned {len(reported.token_ids)} tokens in all."
        )
    sampled_ids, log_probs = np.array(token_ids), np.array(reported.logprobs).reshape(shape)
    top_ids = np.array(reported.token_ids, dtype=np.int32).reshape(shape)[:, 1:]
    in_support = np.isfinite(log_probs[:, 1:])
    is_known = (~in_support).any(axis=1) | (num_top_tokens == vocabulary_size)
    is_known &= np.isfinite(log_probs[:, 0])
    totals = np.where(in_support, np.exp(log_probs[:, 1:]), 0.0).sum(axis=1)
    contains_sampled = (in_support & (top_ids == sampled_ids[:, None])).any(axis=1)
    wrong_positions = (is_known & ~(contains_sampled & (abs(totals - 1) < _SUM_TOLERANCE))).nonzero()[0]
    if len(wrong_positions):
        position = wrong_positions[0]
        raise RuntimeError(
            "a token must be drawn from the support that the engine's filter left, whose probabilities sum "
            f"to 1, but token {sampled_ids[position]} at position {position} of request {number} "
            f"{'is' if contains_sampled[position] else 'is not'} in its set, whose sum is "
            f"{totals[position]:.4f}. This vLLM reports other log-probs: drop "
            "actor_rollout_ref.rollout.top_p, top_k and min_p."
        )
    in_support &= is_known[:, None]
    return RaggedColumn.from_counts(in_support.sum(axis=1), top_ids[in_support])
