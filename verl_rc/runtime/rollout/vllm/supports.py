"""The support of each sampled token, the tokens that vLLM's filters left, from the log-probs that vLLM
reports.

The processed log-prob of a token that top_p, top_k or min_p has removed is -inf. So the support is the
tokens with a finite log-prob, if vLLM reports enough of the most likely tokens.
"""

from typing import Any

import numpy as np

from verl_rc.records.ragged_column import RaggedColumn
from verl_rc.runtime.rollout.vllm.top_tokens import SUM_TOLERANCE, ReportedTokens


def supports(
    token_ids: Any, top: ReportedTokens, number: int, limit: int, vocabulary_size: int
) -> RaggedColumn:
    """The support of each of ``token_ids``; no tokens where it is larger than ``limit``, or the sampled token
    has no finite log-prob.

    Args:
        token_ids: Sampled tokens of one request.
        top: The most likely tokens, ``limit`` or more of them.
        number: The number of the request, for messages.
        limit: Size of the largest support that is recorded, at most the vocabulary.
        vocabulary_size: Number of tokens.

    Raises ``RuntimeError`` when the reported tokens are not the sets that vLLM sampled from.
    """
    sampled_ids = np.array(token_ids)
    top_ids, log_probs = top.ids[:, :limit], top.log_probs[:, :limit]
    in_support = np.isfinite(log_probs)
    is_known = (~in_support).any(axis=1) | (limit == vocabulary_size)
    is_known &= np.isfinite(top.sampled_log_probs)
    totals = np.where(in_support, np.exp(log_probs), 0.0).sum(axis=1)
    contains_sampled = (in_support & (top_ids == sampled_ids[:, None])).any(axis=1)
    wrong_positions = (is_known & ~(contains_sampled & (abs(totals - 1) < SUM_TOLERANCE))).nonzero()[0]
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
