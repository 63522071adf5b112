"""Causal attention as a loop in float64, for kernels to be held against."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attended(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scaling: float) -> Tensor:
    """float64 ``[N, heads, head_dim]`` within packed sequences; keys and values may have fewer heads."""
    expected, first = torch.empty(query.shape, dtype=torch.float64), 0
    group = query.shape[1] // key.shape[1]
    for length in lengths:
        for place in range(first, first + length):
            for head in range(query.shape[1]):
                keys = key[first : place + 1, head // group].double()
                weights = (scaling * keys @ query[place, head].double()).softmax(0)
                expected[place, head] = weights @ value[first : place + 1, head // group].double()
        first += length
    return expected
