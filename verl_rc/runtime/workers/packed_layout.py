"""Where the tokens of packed sequences lie, and the grids in which they are computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class Branches:
    """Sequences that begin with tokens of other packed sequences; only the tokens after those are packed
    again, behind all whole sequences."""

    own_lengths: Tensor
    """int64 ``[S]``: the tokens of each that are its own, at least 1."""
    lengths: Tensor
    """int64 ``[S]``: all its tokens."""
    keys: Tensor
    """int64 ``[sum of lengths]``: packed positions of all its tokens, sequence after sequence."""
    boundaries: tuple[Tensor, Tensor]
    """int32 ``[S + 1]``: where the own tokens of each begin, and where its keys do; the last is where they
    end."""
    longest: tuple[int, int]
    """The most own tokens, and the most tokens, of a sequence."""

    @classmethod
    def from_lengths(
        cls,
        own_lengths: Sequence[int],
        lengths: Sequence[int],
        keys: Tensor,
        device: torch.device,
    ) -> "Branches":
        """From numbers that the host knows: no layer reads any of them from the device."""
        own, whole, places = (
            torch.as_tensor(values, dtype=torch.int64, device=device)
            for values in (own_lengths, lengths, keys)
        )
        ends = (F.pad(values.cumsum(0), (1, 0)).int() for values in (own, whole))
        return cls(own, whole, places, (next(ends), next(ends)), (max(own_lengths), max(lengths)))

    @cached_property
    def grids(self) -> "list[BranchGrid]":
        """The branches in grids, those in one whose numbers of own tokens differ by less than a factor of
        two."""
        own_ends, ends = self.own_lengths.cumsum(0), self.lengths.cumsum(0)
        return [self._grid(rows, own_ends, ends) for rows in _of_similar_length(self.own_lengths)]

    def _grid(self, rows: Tensor, own_ends: Tensor, ends: Tensor) -> "BranchGrid":
        own, lengths = self.own_lengths[rows, None], self.lengths[rows, None]
        steps = torch.arange(int(lengths.max()), device=self.keys.device)
        own_steps = steps[: int(own.max())]
        queries = (own_ends[rows, None] - own + own_steps).where(own_steps < own, 0)
        keys = self.keys[(ends[rows, None] - lengths + steps).where(steps < lengths, 0)]
        return BranchGrid(
            queries, keys, lengths - own + own_steps, (own_steps < own).flatten().nonzero()[:, 0]
        )


@dataclass(frozen=True)
class BranchGrid:
    """Some branches, padded to the longest."""

    queries: Tensor
    """int64 ``[S, Q]``: places among the own tokens of all branches; 0 on padding."""
    keys: Tensor
    """int64 ``[S, K]``: packed positions."""
    positions: Tensor
    """int64 ``[S, Q]``: positions of the queries in their sequences; keys begin at 0."""
    real: Tensor
    """int64: places of the queries that are not padding, in the flat ``[S * Q]``."""


@dataclass(frozen=True)
class PackedLayout:
    """The boundaries of packed sequences, and the places of their tokens in a padded grid ``[num_sequences,
    max_length]``."""

    grid_index: Tensor
    """int64: ``row * max_length + position`` of every token of the whole sequences."""
    position_ids: Tensor
    """int64 ``[N]``: position of every packed token within its sequence, from 0."""
    boundaries: Tensor
    """int32 ``[num_sequences + 1]``: packed position at which each whole sequence begins; the last is where
    they end."""
    num_sequences: int
    max_length: int
    ranks: SequenceParallel | None = None
    """The ranks that share the tokens. None if this rank has all of them."""
    branches: Branches | None = None
    """Sequences that share their beginning. None if all are whole."""

    @cached_property
    def sequences(self) -> "list[SequenceGrid]":
        """All sequences from their first tokens on, those in one grid whose lengths differ by less than a
        factor of two."""
        own, tokens = self.boundaries.diff().long(), torch.arange(len(self.grid_index))
        lengths, tokens = own, tokens.to(own.device)
        if self.branches is not None:
            lengths = torch.cat([lengths, self.branches.lengths])
            own = torch.cat([own, self.branches.own_lengths])
            tokens = torch.cat([tokens, self.branches.keys])
        begins = lengths.cumsum(0) - lengths

        def grid(rows: Tensor) -> SequenceGrid:
            length = lengths[rows, None]
            steps = torch.arange(int(length.max()), device=tokens.device)
            positions = tokens[(begins[rows, None] + steps).where(steps < length, 0)]
            is_own = (steps < length) & (steps >= length - own[rows, None])
            places = is_own.flatten().nonzero()[:, 0]
            return SequenceGrid(positions, places, positions.flatten()[places])

        return [grid(rows) for rows in _of_similar_length(lengths)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_length if self.branches is None else max(self.max_length, self.branches.longest[1])

    @classmethod
    def from_lengths(cls, lengths: Tensor, ranks: SequenceParallel | None = None) -> "PackedLayout":
        """Lay out sequences of ``lengths`` (int64 ``[S]``, tokens, each at least 1) one after the other."""
        if lengths.ndim != 1 or lengths.numel() == 0 or int(lengths.min()) < 1:
            raise ValueError(f"packing needs a list of sequence lengths >= 1, got {lengths.tolist()}.")
        num_sequences, max_length = lengths.numel(), int(lengths.max())
        rows = torch.repeat_interleave(torch.arange(num_sequences, device=lengths.device), lengths)
        boundaries = F.pad(lengths.cumsum(0), (1, 0))
        positions = torch.arange(rows.numel(), device=lengths.device) - boundaries[rows]
        return cls(
            rows * max_length + positions, positions, boundaries.int(), num_sequences, max_length, ranks
        )


@dataclass(frozen=True)
class SequenceGrid:
    """Some sequences, padded on the right to the longest."""

    tokens: Tensor
    """int64 ``[S, W]``: packed positions; 0 on padding."""
    own: Tensor
    """int64: places in the flat ``[S * W]`` of the tokens that are not those of another sequence."""
    own_tokens: Tensor
    """int64: their packed positions."""


def _of_similar_length(lengths: Tensor) -> list[Tensor]:
    """Indices of all sequences, in groups whose ``lengths`` (int64 ``[S]``) differ by less than a factor of
    two."""
    sizes = lengths.double().log2().floor()
    return [(sizes == size).nonzero()[:, 0] for size in sizes.unique()]
