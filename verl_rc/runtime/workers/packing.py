"""Rows of prompts and responses as a model takes them: packed or padded, whole or a rank's part of their
tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.metrics import Mean
from verl_rc.records.batches import TokenBatch, positions_mask
from verl_rc.records.microbatch import SharedPrefixes
from verl_rc.records.pictures import Pictures
from verl_rc.records.ragged import Column
from verl_rc.records.shared_prefixes import find_prefixes, token_entries
from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel
from verl_rc.runtime.workers.packed_layout import Branches, PackedLayout
from verl_rc.runtime.workers.router_replay import Routes
from verl_rc.runtime.workers.vision import PackedPictures
from verl_rc.tensor_ops import placed


def packed_inputs(
    token_ids: Tensor, lengths: Tensor | list[int], pictures: Sequence[Pictures | None] = ()
) -> dict[str, Any]:
    """Arguments of a model's forward pass over packed sequences.

    ``token_ids`` is int64 ``[N]``, sequences one after the other; ``lengths`` int64 ``[S]`` their token
    counts (sum N); ``pictures`` those of each sequence, none if no sequence has one.
    """
    counts = torch.as_tensor(lengths, device=token_ids.device)
    inputs = _arguments(token_ids, PackedLayout.from_lengths(counts))
    if any(pictures):
        inputs["pictures"] = PackedPictures(token_ids, counts.tolist(), pictures)
    return inputs


def _arguments(token_ids: Tensor, layout: PackedLayout) -> dict[str, Any]:
    """The arguments for all packed tokens, or for the part of the layout's rank."""
    if layout.position_ids.numel() != token_ids.numel():
        raise ValueError(
            f"lengths must sum to the number of tokens {token_ids.numel()}, got "
            f"{layout.position_ids.numel()}."
        )
    ids, positions = (
        values if layout.ranks is None else layout.ranks.local_part(values)
        for values in (token_ids, layout.position_ids)
    )
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
        "packed_layout": layout,
    }


@dataclass(frozen=True)
class Predictors:
    """The positions of the model's output, on this rank, that predict response tokens."""

    positions: Tensor
    """int64, counted over all rows: ``[K]``, or those of the tokens that this rank predicts."""
    ranks: SequenceParallel | None = None
    is_local: Tensor | None = None
    """bool ``[K]``: the response tokens that this rank predicts; with ``ranks``."""

    def select(self, values: Tensor) -> Tensor:
        """The part of ``values`` ``[K, …]`` whose tokens this rank predicts."""
        return values if self.is_local is None else values[self.is_local]

    def gather(self, values: Tensor) -> Tensor:
        """The predictions ``[K, …]`` of all ranks, from those of this rank."""
        if self.ranks is None:
            return values
        assert self.is_local is not None
        return self.ranks.gather(values, self.is_local)


@dataclass(frozen=True)
class PackedSequences:
    """The real tokens of some rows, one row after the other, and the positions that predict response
    tokens."""

    token_ids: Tensor
    """int64 ``[N]``."""
    lengths: Tensor
    """int64 ``[S]``: tokens of each conversation; they sum to N. A row is one conversation, or several where
    it has restarts."""
    predictors: Tensor
    """int64 ``[K]``: packed positions whose outputs predict the K response tokens."""
    is_response: Tensor
    """bool ``[B, R]``: the K response tokens, padding left out."""
    once: "ComputedOnce | None" = None
    """The tokens that are computed. None if all are."""
    pictures: Sequence[Pictures | None] = ()
    """Those of each row; empty if no row has one."""

    @classmethod
    def from_tokens(cls, tokens: TokenBatch) -> "PackedSequences":
        """Pack left-padded prompts and right-padded responses."""
        is_prompt = positions_mask(tokens.prompt_lengths, tokens.prompts.shape[1]).flip(-1)
        is_response = positions_mask(tokens.response_lengths, tokens.responses.shape[1])
        real = torch.cat([is_prompt, is_response], dim=-1)
        token_ids = torch.cat([tokens.prompts, tokens.responses], dim=-1)[real]
        response_token = torch.cat([torch.zeros_like(is_prompt), is_response], dim=-1)[real]
        lengths = tokens.sequence_lengths
        if tokens.restarts is not None:
            begins = torch.cat([torch.zeros_like(is_prompt), tokens.restarts & is_response], dim=-1)[real]
            begins[lengths.cumsum(0) - lengths] = True
            lengths = pad(begins.nonzero()[:, 0], (0, 1), value=len(begins)).diff()
        numbers = [] if tokens.pictures is None else tokens.pictures.tolist()
        pictures = [Pictures.known(number) if number else None for number in numbers]
        # A causal model predicts a token at the position before it.
        return cls(token_ids, lengths, response_token.nonzero()[:, 0] - 1, is_response, pictures=pictures)

    def sharing_prefixes(self, sharing: "PrefixSharing", routes: Routes | None = None) -> "PackedSequences":
        """The same sequences with their common prefixes computed once.

        ``routes`` are the experts of the N tokens, which must be equal, too.
        """
        experts = None
        if routes is not None:
            known = routes.is_known[:, None].to(torch.uint8)
            experts = torch.cat([known, routes.expert_ids.flatten(1)], dim=1).cpu().numpy()
        lengths, numbers = self.lengths.tolist(), None
        if self.pictures:
            numbers = np.repeat([0 if one is None else one.number for one in self.pictures], lengths)
        entries = token_entries(self.token_ids.cpu().numpy(), experts, numbers)
        prefixes = find_prefixes(np.split(entries, np.cumsum(lengths)[:-1]))
        sharing.count(prefixes.saved_tokens, len(entries))
        if not prefixes.saved_tokens:
            return self
        return replace(self, once=ComputedOnce.from_prefixes(prefixes, lengths, self.token_ids.device))

    def model_inputs(
        self, remove_padding: bool, ranks: SequenceParallel | None
    ) -> tuple[dict[str, Any], Predictors]:
        """Arguments of the model's forward pass, and the positions of its output that predict response
        tokens."""
        if not remove_padding:
            real = self._real_positions()
            places = real.flatten().nonzero()[:, 0]
            # Padding lies on the right, so a causal mask alone keeps it out of sight of real tokens.
            padded_inputs = {
                "input_ids": placed(self.token_ids, real),
                "position_ids": (real.long().cumsum(-1) - 1).clamp_min(0),
                "attention_mask": None,
                "use_cache": False,
            }
            return padded_inputs, Predictors(places[self.predictors])
        token_ids, predictors = self.token_ids, self.predictors
        if self.once is None:
            layout = PackedLayout.from_lengths(self.lengths, ranks)
        else:
            token_ids, predictors = token_ids[self.once.sources], self.once.places[predictors]
            layout = self.once.layout(ranks)
        inputs = _arguments(token_ids, layout)
        if self.pictures:
            once = () if self.once is None else (self.once.sources, self.once.places)
            lengths = self.lengths.tolist()
            inputs["pictures"] = PackedPictures(self.token_ids, lengths, self.pictures, *once)
        if ranks is None:
            return inputs, Predictors(predictors)
        is_local, positions = ranks.local_positions(predictors, token_ids.numel())
        return inputs, Predictors(positions, ranks, is_local)

    def _real_positions(self) -> Tensor:
        """bool ``[S, longest]``: where ``model_inputs`` puts tokens that it does not pack."""
        return positions_mask(self.lengths, int(self.lengths.max()))

    def model_routes(self, routes: Routes, remove_padding: bool, ranks: SequenceParallel | None) -> Routes:
        """The experts of the N packed tokens, in the layout of ``model_inputs``."""
        packed = (routes.expert_ids, routes.is_known)
        if not remove_padding:
            real = self._real_positions().flatten()
            return Routes(*(placed(values, real) for values in packed))
        if self.once is not None:
            packed = packed[0][self.once.sources], packed[1][self.once.sources]
        return Routes(*(packed if ranks is None else map(ranks.local_part, packed)))

    def to_grid(self, values: Tensor) -> Tensor:
        """``values`` ``[K, …]`` at their places in ``[B, R, …]``, 0 elsewhere."""
        return placed(values, self.is_response)


class PrefixSharing:
    """Common prefixes of packed rows are computed once; counts what that saves."""

    def __init__(self) -> None:
        """Nothing was saved yet."""
        self._saved = self._total = 0

    def count(self, saved_tokens: int, total_tokens: int) -> None:
        """Add a micro-batch."""
        self._saved += saved_tokens
        self._total += total_tokens

    def take_fraction(self) -> Mean[float]:
        """The share of tokens that were not computed since the last call."""
        fraction = Mean(float(self._saved), float(self._total))
        self._saved = self._total = 0
        return fraction


@dataclass(frozen=True)
class ComputedOnce:
    """The M tokens of packed sequences that are computed: those of whole sequences, then the own tokens of
    branches, which begin with tokens of other sequences."""

    sources: Tensor
    """int64 ``[M]``: the places of these tokens among the N packed ones."""
    places: Tensor
    """int64 ``[N]``: of each packed token, which of the M stands for it."""
    position_ids: Tensor
    """int64 ``[M]``."""
    whole_lengths: Tensor
    """int64: tokens of each whole sequence."""
    branches: Branches | None
    """None if no row has tokens of its own beside shared ones."""

    @classmethod
    def from_prefixes(
        cls, prefixes: SharedPrefixes, lengths: Sequence[int], device: torch.device
    ) -> "ComputedOnce":
        """Lay out sequences of ``lengths`` tokens."""
        rows = list(zip(prefixes.order, prefixes.shared, strict=True))
        begins = np.cumsum([0, *lengths])
        whole_lengths = [lengths[row] for row, shared in rows if not shared]
        next_whole, next_own = 0, sum(whole_lengths)
        places = np.empty(begins[-1], np.int64)
        sources, position_ids = np.empty((2, begins[-1] - prefixes.saved_tokens), np.int64)
        own_lengths, branch_lengths, keys = list[int](), list[int](), list[Column]()
        previous = places[:0]
        for row, shared in rows:
            own, mine = lengths[row] - shared, places[begins[row] : begins[row + 1]]
            if shared:
                first, next_own = next_own, next_own + own
            else:
                first, next_whole = next_whole, next_whole + own
            mine[:shared], mine[shared:] = previous[:shared], np.arange(first, first + own)
            position_ids[first : first + own] = np.arange(shared, lengths[row])
            sources[first : first + own] = begins[row] + position_ids[first : first + own]
            if shared and own:
                own_lengths.append(own)
                branch_lengths.append(lengths[row])
                keys.append(mine)
            previous = mine

        def on_device(values: Column | list[int]) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int64, device=device)

        return cls(
            on_device(sources),
            on_device(places),
            on_device(position_ids),
            on_device(whole_lengths),
            Branches.from_lengths(own_lengths, branch_lengths, torch.from_numpy(np.concatenate(keys)), device)
            if keys
            else None,
        )

    def layout(self, ranks: SequenceParallel | None) -> PackedLayout:
        """The layout of the M tokens."""
        whole = PackedLayout.from_lengths(self.whole_lengths, ranks)
        return replace(whole, position_ids=self.position_ids, branches=self.branches)
