"""One forward pass over prompts and responses, packed or padded: log-probs, entropies or values of all
response tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from verl_rc.data.batches import TokenBatch, TokenScores, positions_mask, real_rows
from verl_rc.distributed.sequence_parallel import SequenceParallel
from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, placed
from verl_rc.workers.attention import PackedLayout
from verl_rc.workers.router_replay import RouterReplay, Routes
from verl_rc.workers.scoring_head import PredictedTokens


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
    own_ids, own_places = (
        tokens if ranks is None else ranks.own_tokens(tokens) for tokens in (token_ids, layout.position_ids)
    )
    return {
        "input_ids": own_ids[None],
        "position_ids": own_places[None],
        "attention_mask": None,
        "use_cache": False,
        "packed_layout": layout,
    }


@dataclass(frozen=True)
class ForwardOptions:
    """How a forward pass runs. Except for the temperature, results depend on it by rounding only."""

    temperature: float = 1.0
    """Logits are divided by it, as the sampler does."""
    remove_padding: bool = True
    """Pack real tokens of all rows instead of padding every row to the longest."""
    entropy_gradient: bool = True
    """Whether entropies carry a gradient; without one they are only looked at."""
    ranks: SequenceParallel | None = None
    """The ranks that share the tokens of a micro-batch, which must be packed; None: ranks have
    different micro-batches."""
    replay: RouterReplay | None = None
    """Of the model's routers: tokens take the experts that are recorded beside them; None: their own."""


def score_tokens(
    model: nn.Module,
    tokens: TokenBatch,
    options: ForwardOptions,
    with_entropy: bool,
    with_sum_pi_squared: bool = False,
    top_tokens: int = 0,
    candidate_ids: Tensor | None = None,
) -> TokenScores:
    """Log-probs of the response tokens under a language model: position t is read from the hidden state one
    to its left.

    Where the engine has recorded which tokens its filter kept, these alone can be drawn here too: log-probs
    and what is averaged over a distribution are those of the kept tokens. Where it has recorded experts, and
    ``options`` replay them, tokens take these. ``candidate_ids`` (integers ``[B, R, C]``) are other tokens
    whose log-probs are computed too; ``top_tokens`` says of how many of the most likely tokens they are.
    """
    packed = PackedSequences.from_tokens(tokens)
    inputs, predictors = packed.model_inputs(options)
    has_experts = options.replay is not None and tokens.experts_counts is not None
    if options.replay is not None:
        options.replay.use(packed.routes(tokens, options) if has_experts else None)
    # Row by row and from left to right, the order in which nonzero() lists the predictors.
    targets = tokens.responses[packed.is_response]
    score_options = ScoreOptions(
        options.temperature, with_entropy, options.entropy_gradient, with_sum_pi_squared, top_tokens
    )
    kept_ids = _kept_ids(tokens, packed.is_response)
    predicted = PredictedTokens(
        predictors.positions,
        predictors.select(targets),
        score_options,
        None if kept_ids is None else predictors.select(kept_ids),
        None if candidate_ids is None else predictors.select(candidate_ids[packed.is_response].long()),
    )
    found: HiddenStateScores = model(predicted=predicted, **inputs)

    def everywhere(outputs: Tensor) -> Tensor:
        return packed.to_grid(predictors.gather(outputs))

    everything: dict[str, Any] = {
        name: None if values is None else everywhere(values) for name, values in found._asdict().items()
    }
    scores = TokenScores(**everything)
    if options.replay is None or not has_experts:
        return scores
    is_flipped = options.replay.is_flipped[predictors.positions]
    return replace(scores, flipped_experts=everywhere(is_flipped.float()))


def _kept_ids(tokens: TokenBatch, is_response: Tensor) -> Tensor | None:
    """int64 ``[K, W]``: the kept tokens at each of K response tokens, padded with -1; None: no filter."""
    if tokens.kept_counts is None or tokens.kept_ids is None:
        return None
    counts = tokens.kept_counts[is_response]
    sets = positions_mask(counts, max(1, int(counts.max()))) if len(counts) else is_response[:0]
    ids = torch.cat(real_rows(tokens.kept_ids, tokens.kept_counts.sum(-1)))
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
    """Where the outputs lie that predict the K response tokens of a micro-batch, on this rank."""

    positions: Tensor
    """int64 ``[K]``, or those of this rank's part: places in the model's output, counted over all rows."""
    ranks: SequenceParallel | None = None
    is_own: Tensor | None = None
    """bool ``[K]``: which of the response tokens this rank predicts; None: all."""

    def select(self, values: Tensor) -> Tensor:
        """Those of ``values`` ``[K, …]`` that belong to this rank's predictions."""
        return values if self.is_own is None else values[self.is_own]

    def gather(self, values: Tensor) -> Tensor:
        """What all ranks predict ``[K, …]``, from this rank's part."""
        return values if self.ranks is None or self.is_own is None else self.ranks.gather(values, self.is_own)


@dataclass(frozen=True)
class PackedSequences:
    """The real tokens of some rows, one row after the other, and where the response tokens are predicted."""

    token_ids: Tensor
    """int64 ``[N]``."""
    lengths: Tensor
    """int64 ``[S]``: tokens of each conversation; they sum to N. A row is one, unless another begins in
    it."""
    predictors: Tensor
    """int64 ``[K]``: packed positions whose outputs predict the K response tokens."""
    is_response: Tensor
    """bool ``[B, R]``: where those lie on the grid of responses."""

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
        """Arguments of the model's forward pass, and where its outputs predict response tokens."""
        if not options.remove_padding:
            real = positions_mask(self.lengths, int(self.lengths.max()))
            padded_ids = torch.zeros(real.shape, dtype=torch.int64, device=self.token_ids.device)
            padded_ids[real] = self.token_ids
            places = real.flatten().nonzero()[:, 0]
            # Padding lies on the right, so a causal mask alone keeps it out of sight of real tokens.
            padded_inputs = {
                "input_ids": padded_ids,
                "position_ids": (real.long().cumsum(-1) - 1).clamp_min(0),
                "attention_mask": None,
                "use_cache": False,
            }
            return padded_inputs, Predictors(places[self.predictors])
        inputs = packed_inputs(self.token_ids, self.lengths, options.ranks)
        if options.ranks is None:
            return inputs, Predictors(self.predictors)
        is_own, positions = options.ranks.own_positions(self.predictors, self.token_ids.numel())
        return inputs, Predictors(positions, options.ranks, is_own)

    def routes(self, tokens: TokenBatch, options: ForwardOptions) -> Routes:
        """The experts recorded beside ``tokens``, as ``model_inputs`` lays tokens out."""
        assert options.replay is not None
        routes = options.replay.packed_routes(tokens, self.predictors, self.is_response, len(self.token_ids))
        if not options.remove_padding:
            real = positions_mask(self.lengths, int(self.lengths.max())).flatten()
            return Routes(*(_spread(values, real) for values in (routes.expert_ids, routes.is_known)))
        if options.ranks is None:
            return routes
        own = (options.ranks.own_tokens(values) for values in (routes.expert_ids, routes.is_known))
        return Routes(*own)

    def to_grid(self, values: Tensor) -> Tensor:
        """``values`` ``[K, …]`` at their places in ``[B, R, …]``, 0 elsewhere."""
        return placed(values, self.is_response)


def _spread(values: Tensor, real: Tensor) -> Tensor:
    """``values`` ``[N, …]`` where ``real`` (bool ``[S]``), 0 elsewhere."""
    spread = torch.zeros(len(real), *values.shape[1:], dtype=values.dtype, device=values.device)
    spread[real] = values
    return spread
