"""One forward pass over prompts and responses, packed or padded: log-probs, entropies or values of all response tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verl_rc.data.batches import TokenBatch, TokenScores, positions_mask
from verl_rc.distributed.sequence_parallel import SequenceParallel
from verl_rc.tensor_ops import ScoreOptions
from verl_rc.workers.scoring_head import PredictedTokens, score_predicted

PACKED_ATTENTION = "verl_rc_packed_sdpa"


@dataclass(frozen=True)
class PackedLayout:
    """Places of packed tokens in a padded ``[num_sequences, max_length]`` grid."""

    grid_index: Tensor
    """int64 ``[N]``: ``row * max_length + position`` of every packed token."""
    position_ids: Tensor
    """int64 ``[N]``: position within the own sequence, restarting at 0."""
    num_sequences: int
    max_length: int
    ranks: SequenceParallel | None = None
    """The ranks that share the tokens; None: this rank has all of them."""

    @classmethod
    def from_lengths(cls, lengths: Tensor, ranks: SequenceParallel | None = None) -> "PackedLayout":
        """Lay out sequences of ``lengths`` (int64 ``[S]``, tokens, each at least 1) one after the other."""
        if lengths.ndim != 1 or lengths.numel() == 0 or int(lengths.min()) < 1:
            raise ValueError(f"packing needs a list of sequence lengths >= 1, got {lengths.tolist()}.")
        num_sequences, max_length = lengths.numel(), int(lengths.max())
        rows = torch.repeat_interleave(torch.arange(num_sequences, device=lengths.device), lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(rows.numel(), device=lengths.device) - starts[rows]
        return cls(rows * max_length + positions, positions, num_sequences, max_length, ranks)


def packed_sdpa(  # noqa: PLR0913  (the signature transformers calls)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    ``query``, ``key``, ``value`` are ``[1, heads, N, head_dim]`` over packed tokens, or over this rank's part of them. Rows are
    padded on the right, where a causal mask alone keeps padding out of every real token's sight. Without a layout it is plain
    padded attention. transformers calls it through its ``AttentionInterface``, whose signature it must have.

    Raises ``ValueError`` when ``sliding_window``, ``softcap`` or sinks (``s_aux``) would change the result, which are not built.
    """
    longest = query.shape[2] if packed_layout is None else packed_layout.max_length
    if softcap is not None or s_aux is not None or (sliding_window is not None and sliding_window < longest):
        raise ValueError(
            f"{type(module).__name__} wants attention with sliding_window={sliding_window}, softcap={softcap} or sinks for "
            f"sequences of {longest} tokens, which is not built. Train another model, or shorter sequences."
        )
    grouped = key.shape[1] != query.shape[1]
    if packed_layout is None:
        # With one query position is_causal would mask all keys but the first.
        causal = attention_mask is None and query.shape[2] > 1
        output = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None
    rows, width, index = packed_layout.num_sequences, packed_layout.max_length, packed_layout.grid_index
    ranks = packed_layout.ranks
    if ranks is not None:
        query, key, value = (part[:, :, : index.numel()] for part in ranks.heads_of_all_tokens(query, key, value))

    # Padded for attention only, which took a third of the time of a block mask over all
    # packed tokens, whose cost grows with the square of their number.
    def to_grid(packed: Tensor) -> Tensor:
        heads, head_dim = packed.shape[1], packed.shape[3]
        # index_copy and index_select have gradients and need no size from the device.
        grid = packed.new_zeros(rows * width, heads, head_dim).index_copy(0, index, packed[0].transpose(0, 1))
        return grid.view(rows, width, heads, head_dim).transpose(1, 2)

    output = F.scaled_dot_product_attention(
        to_grid(query), to_grid(key), to_grid(value), dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    flat = output.transpose(1, 2).reshape(rows * width, output.shape[1], output.shape[3])
    attended = flat.index_select(0, index)[None]
    return attended if ranks is None else ranks.tokens_of_all_heads(attended), None


AttentionInterface.register(PACKED_ATTENTION, packed_sdpa)


def packed_logits(model: nn.Module, token_ids: Tensor, lengths: Tensor | list[int], keep: Tensor | None = None) -> Tensor:
    """Logits (or, of a value model, values) of packed sequences: ``[N, V]``, or with ``keep`` ``[K, V]``.

    ``token_ids`` and ``lengths`` are those of ``packed_inputs``; ``keep`` (int64 ``[K]``) are packed positions.
    """
    # transformers' logits_to_keep takes positions: no logits are computed for prompts.
    selection = {} if keep is None else {"logits_to_keep": keep}
    logits: Tensor = model(**packed_inputs(token_ids, lengths), **selection).logits
    return logits[0]


def packed_inputs(token_ids: Tensor, lengths: Tensor | list[int], ranks: SequenceParallel | None = None) -> dict[str, Any]:
    """Arguments of a model's forward pass over packed sequences, or over this rank's part of their tokens.

    ``token_ids`` is int64 ``[N]``, sequences one after the other; ``lengths`` int64 ``[S]`` their token counts (sum N).
    """
    layout = PackedLayout.from_lengths(torch.as_tensor(lengths, device=token_ids.device), ranks)
    if layout.grid_index.numel() != token_ids.numel():
        raise ValueError(f"lengths must sum to the number of tokens {token_ids.numel()}, got {layout.grid_index.numel()}.")
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


def padded_inputs(token_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Arguments of a model's forward pass over right-padded sequences ``token_ids`` ``[B, S]`` (``use_remove_padding=False``).

    Padding lies on the right, so a causal mask alone keeps it out of sight of real tokens.
    """
    position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": token_ids, "position_ids": position_ids, "attention_mask": None, "use_cache": False}


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
    """The ranks that share the tokens of a micro-batch, which must be packed; None: every rank has micro-batches of its own."""


def score_tokens(
    model: nn.Module, tokens: TokenBatch, options: ForwardOptions, with_entropy: bool, with_sum_pi_squared: bool = False
) -> TokenScores:
    """Log-probs of the response tokens under a language model: position t is read from the hidden state one to its left."""
    packed = PackedSequences.from_tokens(tokens)
    inputs, predictors = packed.model_inputs(options)
    # Row by row and from left to right, the order in which nonzero() lists the predictors.
    targets = tokens.responses[packed.is_response]
    wanted = ScoreOptions(options.temperature, with_entropy, options.entropy_gradient, with_sum_pi_squared)
    predicted = PredictedTokens(predictors.positions, predictors.select(targets), wanted)
    log_probs, *further = score_predicted(model, predicted, **inputs)

    def everywhere(own: Tensor) -> Tensor:
        return packed.to_grid(predictors.gather(own))

    return TokenScores(everywhere(log_probs), *(None if values is None else everywhere(values) for values in further))


def score_values(model: nn.Module, tokens: TokenBatch, options: ForwardOptions) -> Tensor:
    """The critic's value before each response token, float32 ``[B, R]``, read one position to its left; 0 on padding."""
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
        """Those of ``values`` ``[K]`` that belong to this rank's predictions."""
        return values if self.is_own is None else values[self.is_own]

    def gather(self, values: Tensor) -> Tensor:
        """What all ranks predict ``[K]``, from this rank's part."""
        return values if self.ranks is None or self.is_own is None else self.ranks.gather(values, self.is_own)


@dataclass(frozen=True)
class PackedSequences:
    """The real tokens of some rows, one row after the other, and where the response tokens are predicted."""

    token_ids: Tensor
    """int64 ``[N]``."""
    lengths: Tensor
    """int64 ``[B]``: prompt and response tokens of each row; they sum to N."""
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
        # A causal model predicts a token at the position before it.
        return cls(token_ids, tokens.sequence_lengths, response_token.nonzero()[:, 0] - 1, is_response)

    def model_inputs(self, options: ForwardOptions) -> tuple[dict[str, Any], Predictors]:
        """Arguments of the model's forward pass, and where its outputs predict response tokens."""
        if not options.remove_padding:
            inputs, real = _padded(self)
            return inputs, Predictors(real.flatten().nonzero()[:, 0][self.predictors])
        inputs = packed_inputs(self.token_ids, self.lengths, options.ranks)
        if options.ranks is None:
            return inputs, Predictors(self.predictors)
        is_own, positions = options.ranks.own_positions(self.predictors, self.token_ids.numel())
        return inputs, Predictors(positions, options.ranks, is_own)

    def to_grid(self, values: Tensor) -> Tensor:
        """``values`` ``[K]`` at their places in ``[B, R]``, 0 elsewhere."""
        # masked_scatter: an assignment by a boolean index would make the host wait for the number of tokens.
        grid = torch.zeros(self.is_response.shape, dtype=values.dtype, device=values.device)
        return grid.masked_scatter(self.is_response, values)


def _padded(packed: PackedSequences) -> tuple[dict[str, Any], Tensor]:
    """Inputs with every row padded to the longest, and bool ``[B, S]``: where real tokens lie."""
    real = positions_mask(packed.lengths, int(packed.lengths.max()))
    padded_ids = torch.zeros(real.shape, dtype=torch.int64, device=packed.token_ids.device)
    padded_ids[real] = packed.token_ids
    return padded_inputs(padded_ids, real), real


def attention_problem(config: Any, longest: int) -> str | None:
    """Why a model with this ``config.json`` cannot be trained on sequences of ``longest`` tokens, or None.

    Its attention must be full and causal: no window that is shorter, no soft cap, no sinks, no other kind of layer.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in kinds or not hasattr(text, "layer_types")
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if text.model_type in _WITH_SINKS:
        return "its attention has sinks, which are not built"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return f"its attention is soft-capped (attn_logit_softcapping={text.attn_logit_softcapping:g}), which is not built"
    if others:
        return f"it has layers of kind {', '.join(others)}, which are not built"
    if window is not None and slides and window < longest:
        return (
            f"its attention looks back sliding_window={window} tokens, which is not built, and sequences have up to {longest}: "
            f"lower data.max_prompt_length + data.max_response_length to {window}"
        )
    return None


_WITH_SINKS = {"gpt_oss"}
"""Values of ``model_type``."""
