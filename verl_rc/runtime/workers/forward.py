"""One forward pass over prompts and responses, packed or padded: log-probs, entropies or values of all
response tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from verl_rc.records.batches import TokenBatch, TokenScores, positions_mask, real_rows
from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel
from verl_rc.runtime.workers.attention import PackedLayout
from verl_rc.runtime.workers.router_replay import RouterReplay, Routes
from verl_rc.runtime.workers.scoring_head import PredictedTokens
from verl_rc.tensor_ops import ScoreOptions, placed


def packed_logits(
    model: nn.Module, token_ids: Tensor, lengths: Tensor | list[int], keep: Tensor | None = None
) -> Tensor:
    """Logits (or, of a value model, values) of packed sequences: ``[N, V]``, or with ``keep`` ``[K, V]``.

    ``token_ids`` and ``lengths`` are those of ``packed_inputs``; ``keep`` (int64 ``[K]``) are packed
    positions.
    """
    # transformers' logits_to_keep takes positions: no logits are computed for prompts.
    selection = {} if keep is None else {"logits_to_keep": keep}
    logits: Tensor = model(**packed_inputs(token_ids, lengths), **selection).logits
    return logits[0]


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
class ForwardOptions:
    """Options of a forward pass. Except for the temperature, they change results by rounding only."""

    temperature: float = 1.0
    """Logits are divided by it, as the sampler does."""
    remove_padding: bool = True
    """Pack real tokens of all rows instead of padding every row to the longest."""
    entropy_gradient: bool = True
    """Whether entropies carry a gradient."""
    ranks: SequenceParallel | None = None
    """The ranks that share the tokens of a micro-batch, which must be packed. None if ranks have different
    micro-batches."""
    replay: RouterReplay | None = None
    """Replays the experts recorded beside tokens. None if tokens take the experts that the model chooses."""


def score_tokens(
    model: nn.Module,
    tokens: TokenBatch,
    options: ForwardOptions,
    with_entropy: bool,
    with_sum_pi_squared: bool = False,
    top_tokens: int = 0,
    candidate_ids: Tensor | None = None,
) -> TokenScores:
    """Log-probs of the response tokens under a language model; the hidden state at a position predicts the
    next token.

    Where ``tokens`` have supports, each distribution is over its support alone. Where they have experts and
    ``options`` have a replay, tokens take these experts. Log-probs of ``candidate_ids`` (integers ``[B, R,
    C]``) and of the ``top_tokens`` most likely tokens are computed too.
    """
    packed = PackedSequences.from_tokens(tokens)
    inputs, predictors = packed.model_inputs(options)
    replay = None if tokens.experts_counts is None else options.replay
    if options.replay is not None:
        options.replay.use(None if replay is None else packed.routes(tokens, options, replay))
    # Row by row and from left to right, the order in which nonzero() lists the predictors.
    targets = tokens.responses[packed.is_response]
    score_options = ScoreOptions(
        options.temperature, with_entropy, options.entropy_gradient, with_sum_pi_squared, top_tokens
    )
    support_ids = _support_ids(tokens, packed.is_response)
    predicted = PredictedTokens(
        predictors.positions,
        predictors.select(targets),
        score_options,
        None if support_ids is None else predictors.select(support_ids),
        None if candidate_ids is None else predictors.select(candidate_ids[packed.is_response].long()),
    )
    outputs: dict[str, Tensor | None] = model(predicted=predicted, **inputs)._asdict()
    if replay is not None:
        outputs["flipped_experts"] = replay.is_flipped[predictors.positions].float()
    grids: dict[str, Any] = {
        name: None if values is None else packed.to_grid(predictors.gather(values))
        for name, values in outputs.items()
    }
    return TokenScores(**grids)


def _support_ids(tokens: TokenBatch, is_response: Tensor) -> Tensor | None:
    """int64 ``[K, W]``: the support of each of K response tokens, padded with -1. None without a filter."""
    if tokens.support_counts is None:
        return None
    assert tokens.support_ids is not None
    counts = tokens.support_counts[is_response]
    sets = positions_mask(counts, max(1, int(counts.max()))) if len(counts) else is_response[:0]
    ids = torch.cat(real_rows(tokens.support_ids, tokens.support_counts.sum(-1)))
    return torch.full_like(sets, -1, dtype=torch.int64).masked_scatter(sets, ids.long())


def score_values(model: nn.Module, tokens: TokenBatch, options: ForwardOptions) -> Tensor:
    """The critic's value before each response token, float32 ``[B, R]``, read one position to its left; 0 on
    padding."""
    packed = PackedSequences.from_tokens(tokens)
    inputs, predictors = packed.model_inputs(options)
    outputs = model(**inputs).logits.flatten(0, 1)[predictors.positions, 0]
    # float32 before the loss: returns of hundreds have steps of 1 or more in bfloat16.
    return packed.to_grid(predictors.gather(outputs.float()))


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

    def model_inputs(self, options: ForwardOptions) -> tuple[dict[str, Any], Predictors]:
        """Arguments of the model's forward pass, and the positions of its output that predict response
        tokens."""
        if not options.remove_padding:
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
        inputs = packed_inputs(self.token_ids, self.lengths, options.ranks)
        if options.ranks is None:
            return inputs, Predictors(self.predictors)
        is_local, positions = options.ranks.local_positions(self.predictors, self.token_ids.numel())
        return inputs, Predictors(positions, options.ranks, is_local)

    def _real_positions(self) -> Tensor:
        """bool ``[S, longest]``: where ``model_inputs`` puts tokens that it does not pack."""
        return positions_mask(self.lengths, int(self.lengths.max()))

    def routes(self, tokens: TokenBatch, options: ForwardOptions, replay: RouterReplay) -> Routes:
        """The experts recorded beside ``tokens``, in the layout of ``model_inputs``."""
        routes = replay.packed_routes(tokens, self.predictors, self.is_response, len(self.token_ids))
        packed = (routes.expert_ids, routes.is_known)
        if not options.remove_padding:
            real = self._real_positions().flatten()
            return Routes(*(placed(values, real) for values in packed))
        if options.ranks is None:
            return routes
        return Routes(*map(options.ranks.local_part, packed))

    def to_grid(self, values: Tensor) -> Tensor:
        """``values`` ``[K, …]`` at their places in ``[B, R, …]``, 0 elsewhere."""
        return placed(values, self.is_response)
