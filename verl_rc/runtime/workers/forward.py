"""One forward pass over prompts and responses, packed or padded: log-probs, entropies or values of all
response tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.records.batches import TokenBatch, TokenScores, positions_mask, real_rows
from verl_rc.records.pictures import Pictures
from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel
from verl_rc.runtime.workers.packing import PackedSequences, PrefixSharing, packed_inputs
from verl_rc.runtime.workers.router_replay import RouterReplay
from verl_rc.runtime.workers.scoring_head import PredictedTokens
from verl_rc.tensor_ops import ScoreOptions


def packed_logits(
    model: nn.Module,
    token_ids: Tensor,
    lengths: Tensor | list[int],
    keep: Tensor | None = None,
    pictures: Sequence[Pictures | None] = (),
) -> Tensor:
    """Logits (or, of a value model, values) of packed sequences: ``[N, V]``, or with ``keep`` ``[K, V]``.

    ``token_ids`` and ``lengths`` are those of ``packed_inputs``; ``keep`` (int64 ``[K]``) are packed
    positions. ``pictures`` are those of each sequence; none if no sequence has one.
    """
    # transformers' logits_to_keep takes positions: no logits are computed for prompts.
    selection = {} if keep is None else {"logits_to_keep": keep}
    logits: Tensor = model(**packed_inputs(token_ids, lengths, pictures), **selection).logits
    return logits[0]


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
    prefixes: PrefixSharing | None = None
    """Common prefixes of packed rows are computed once. None if all tokens are."""
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
    packed, layout = PackedSequences.from_tokens(tokens), (options.remove_padding, options.ranks)
    replay, routes = None if tokens.experts_counts is None else options.replay, None
    if replay is not None:
        routes = replay.packed_routes(tokens, packed.predictors, packed.is_response, len(packed.token_ids))
    if options.prefixes is not None:
        packed = packed.sharing_prefixes(options.prefixes, routes)
    inputs, predictors = packed.model_inputs(*layout)
    if options.replay is not None:
        options.replay.use(None if routes is None else packed.model_routes(routes, *layout))
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
    if options.prefixes is not None:
        packed = packed.sharing_prefixes(options.prefixes)
    inputs, predictors = packed.model_inputs(options.remove_padding, options.ranks)
    outputs = model(**inputs).logits.flatten(0, 1)[predictors.positions, 0]
    # float32 before the loss: returns of hundreds have steps of 1 or more in bfloat16.
    return packed.to_grid(predictors.gather(outputs.float()))
