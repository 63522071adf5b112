"""Sums over groups of rows that answer the same prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.tensor_ops.groups import group_numbers


@dataclass(frozen=True)
class Groups:
    """Which row belongs to which group, and which rows count.

    Attributes:
        index: [B], int64, in [0, num_groups).
        counted: [B], bool; rows without it neither enter a sum nor add to a size.
        num_groups: an upper bound of the number of groups; the length of every per-group tensor.
    """

    index: Tensor
    counted: Tensor
    num_groups: int

    def sum(self, values: Tensor) -> Tensor:
        """Adds up the counted rows of `values` [B, ...] per group: [num_groups, ...]."""
        counted = self.counted.view(-1, *(1,) * (values.ndim - 1))
        sums = values.new_zeros((self.num_groups, *values.shape[1:]))
        return sums.index_add(0, self.index, values.where(counted, 0))

    def amax(self, values: Tensor) -> Tensor:
        """Largest counted value [B] per group: [num_groups]; −inf for a group without one."""
        values = values.where(self.counted, values.new_full((), -torch.inf))
        return values.new_full((self.num_groups,), -torch.inf).scatter_reduce(0, self.index, values, "amax")

    def per_row(self, values: Tensor) -> Tensor:
        """Spreads values of groups [num_groups, ...] over their rows: [B, ...]."""
        return values[self.index]

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """Counted rows in each row's group: [B]."""
        return self.per_row(self.sum(self.counted.to(dtype)))

    def means(self, values: Tensor) -> Tensor:
        """Mean over the counted rows of each row's group: [B]; 0 for a group without any."""
        return self.per_row(self.sum(values)) / self.sizes(values.dtype).clamp(min=1)

    def stds(self, values: Tensor) -> Tensor:
        """Standard deviation (n − 1 in the denominator) over each row's group: [B]; 0 for fewer than two rows."""
        squares = self.per_row(self.sum((values - self.means(values)).square()))
        return (squares / (self.sizes(values.dtype) - 1).clamp(min=1)).sqrt()


def make_groups(group_ids: Sequence[Hashable] | Tensor, counted: Tensor) -> Groups:
    """Numbers the groups.

    Args:
        group_ids: B identifiers of prompts, strings or integers, or an integer tensor [B]; order means nothing.
        counted: [B], bool; rows that count.

    Raises:
        ValueError: when there is not one identifier per row.
    """
    rows = counted.shape[0]
    if len(group_ids) != rows:
        raise ValueError(f"group_ids must name the prompt of each of the {rows} rows; got {len(group_ids)} identifiers")
    num_groups = rows if isinstance(group_ids, Tensor) else len(set(group_ids))
    return Groups(group_numbers(group_ids, counted.device), counted, num_groups)
