"""The set of tokens that vLLM's filters have left at each place, from the log-probs that it reports.

With processed log-probs, a token that top_p, top_k or min_p has taken away has -inf: of enough tokens, the
most likely first, those with a finite one are the set.
"""

from typing import Any

import numpy as np

from verl_rc.data.ragged_column import RaggedColumn

_SUM = 1e-3
"""Largest distance of the sum of a set's probabilities from 1."""


def kept_sets(token_ids: Any, flat: Any, number: int, limit: int, vocabulary: int) -> RaggedColumn:
    """The set that each of ``token_ids`` was drawn from; nothing where it is larger than ``limit``, or the
    token's log-prob is not a number.

    Args:
        token_ids: Sampled tokens of one request.
        flat: vLLM's ``FlatLogprobs`` of them: at each place the sampled token, then the ``limit`` most
            likely.
        number: That of the sample, for messages.
        limit: Tokens that were asked for at each place, at most the vocabulary.
        vocabulary: Number of words.

    Raises ``RuntimeError`` when the reported tokens are not the sets that were drawn from.
    """
    shape = len(token_ids), limit + 1
    if len(flat.token_ids) != shape[0] * shape[1]:
        raise RuntimeError(
            f"each of the {shape[0]} tokens of request {number} must come with {limit} likely ones, to see "
            f"what the filter has kept, the engine returned {len(flat.token_ids)} tokens in all."
        )
    sampled, log_probs = np.array(token_ids), np.array(flat.logprobs).reshape(shape)
    ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)[:, 1:]
    is_kept = np.isfinite(log_probs[:, 1:])
    is_known = (~is_kept).any(axis=1) | (limit == vocabulary)
    is_known &= np.isfinite(log_probs[:, 0])
    totals = np.where(is_kept, np.exp(log_probs[:, 1:]), 0.0).sum(axis=1)
    has_sampled = (is_kept & (ids == sampled[:, None])).any(axis=1)
    wrong = (is_known & ~(has_sampled & (abs(totals - 1) < _SUM))).nonzero()[0]
    if len(wrong):
        place = wrong[0]
        raise RuntimeError(
            "a token must be drawn from the set that the engine's filter has kept, whose probabilities sum "
            f"to 1, but token {sampled[place]} at place {place} of request {number} "
            f"{'is' if has_sampled[place] else 'is not'} in its set, whose sum is {totals[place]:.4f}. This "
            "vLLM reports other log-probs: drop actor_rollout_ref.rollout.top_p, top_k and min_p."
        )
    is_kept &= is_known[:, None]
    return RaggedColumn.from_counts(is_kept.sum(axis=1), ids[is_kept])
