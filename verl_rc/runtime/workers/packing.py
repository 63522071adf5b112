"""Rows of prompts and responses as a model takes them: packed or padded, whole or a rank's part of their
tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.records.batches import TokenBatch, positions_mask
from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel
from verl_rc.runtime.workers.attention import PackedLayout
from verl_rc.runtime.workers.router_replay import Routes
from verl_rc.tensor_ops import placed


def packed_inputs(
    token_ids: Tensor, lengths: Tensor | list[int], ranks: SequenceParallel | None = None
) -> dict[str, Any]:
    """Arguments of a model's forward pass over packed sequences, or over this rank's part of their tokens.

    ``token_ids`` is int64 ``[N]``, sequences one after the other; ``lengths`` int64 ``[S]`` their token
    counts (sum N).
    """
    layout = PackedLayout.from_lengths(torch.as_tensor(lengths, device=token_ids.device), ranks)
    if layout.grid_index.numel() != token_ids.numel():
        raise ValueError(
            f"lengths must sum to the number of tokens {token_ids.numel()}, got {layout.grid_index.numel()}."
        )
    local_ids, local_positions = (
        values if ranks is None else ranks.local_part(values) for values in (token_ids, layout.position_ids)
    )
    return {
        "input_ids": local_ids[None],
        "position_ids": local_positions[None],
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
        # A causal model predicts a token at the position before it.
        return cls(token_ids, lengths, response_token.nonzero()[:, 0] - 1, is_response)

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
        inputs = packed_inputs(self.token_ids, self.lengths, ranks)
        if ranks is None:
            return inputs, Predictors(self.predictors)
        is_local, positions = ranks.local_positions(self.predictors, self.token_ids.numel())
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
        if ranks is None:
            return routes
        return Routes(*map(ranks.local_part, packed))

    def to_grid(self, values: Tensor) -> Tensor:
        """``values`` ``[K, …]`` at their places in ``[B, R, …]``, 0 elsewhere."""
        return placed(values, self.is_response)
