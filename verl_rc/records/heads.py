"""Heads of a sampler's distributions, as a column beside sampled tokens: the most likely tokens of each place
and their log-probs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.records.ragged_column import RaggedColumn

Array = np.ndarray[Any, Any]


def head_column(token_ids: Array, log_probs: Array) -> RaggedColumn:
    """The column of T heads, from token ids int32 ``[T, k]`` and their log-probs float32 ``[T, k]``, nats;
    tokens with a log-prob of -inf are left out.

    The list of a token holds its ids, then the bits of their log-probs: so one list of integers is recorded,
    cut, saved and sent like those of all columns.
    """
    is_there = np.isfinite(log_probs)
    counts = is_there.sum(axis=1)
    # Per token first all ids, then all log-probs.
    both = np.stack([token_ids.astype(np.int32), log_probs.astype(np.float32).view(np.int32)], axis=1)
    values = both[np.broadcast_to(is_there[:, None], both.shape)]
    return RaggedColumn.from_counts(2 * counts, values)


def heads(counts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids int64 ``[B, R, C]`` and log-probs float32 ``[B, R, C]``, nats, of the heads of a padded
    batch; where a head has fewer than C tokens, ids are -1 and log-probs -inf.

    ``counts`` (int64 ``[B, R]``) and ``values`` (int32 ``[B, K]``) are the fields of the column.
    """
    sizes, values = counts // 2, pad(values, (0, 1))  # at least one column
    width = max(1, int(sizes.max()))
    places = torch.arange(width, device=counts.device)
    is_there = places < sizes[..., None]
    starts = pad(counts.cumsum(-1)[:, :-1], (1, 0))[..., None]
    rows = torch.arange(len(counts), device=counts.device)[:, None, None]
    first = torch.where(is_there, starts + places, 0)
    second = torch.where(is_there, first + sizes[..., None], 0)
    ids = values[rows, first].long().where(is_there, -1)
    log_probs = values[rows, second].view(torch.float32).where(is_there, -torch.inf)
    return ids, log_probs
