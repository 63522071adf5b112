"""One forward pass over prompts and responses: log-probs, entropies or values of all response tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.data.batches import TokenBatch, TokenScores, positions_mask
from verl_rc.tensor_ops import ScoreOptions
from verl_rc.workers.packing import packed_inputs, packed_logits, padded_inputs
from verl_rc.workers.scoring_head import PredictedTokens, score_predicted


@dataclass(frozen=True)
class ForwardOptions:
    """How a forward pass runs. Except for the temperature, results depend on it by rounding only."""

    temperature: float
    """Logits are divided by it, as the sampler does."""
    remove_padding: bool = True
    """Pack real tokens of all rows instead of padding every row to the longest."""
    entropy_gradient: bool = True
    """Whether entropies carry a gradient; without one they are only looked at."""


def score_tokens(
    model: nn.Module, tokens: TokenBatch, options: ForwardOptions, with_entropy: bool, with_sum_pi_squared: bool = False
) -> TokenScores:
    """Log-probs of the response tokens under a language model: position t is read from the hidden state one to its left."""
    packed = PackedSequences.from_tokens(tokens)
    if options.remove_padding:
        inputs, positions = packed_inputs(packed.token_ids, packed.lengths), packed.predictors
    else:
        inputs, real = _padded(packed)
        positions = real.flatten().nonzero()[:, 0][packed.predictors]
    # Row by row and from left to right, the order in which nonzero() lists the predictors.
    targets = tokens.responses[packed.is_response]
    wanted = ScoreOptions(options.temperature, with_entropy, options.entropy_gradient, with_sum_pi_squared)
    log_probs, *further = score_predicted(model, PredictedTokens(positions, targets, wanted), **inputs)
    return TokenScores(packed.to_grid(log_probs), *(None if values is None else packed.to_grid(values) for values in further))


def score_values(model: nn.Module, tokens: TokenBatch, remove_padding: bool) -> Tensor:
    """The critic's value before each response token, float32 ``[B, R]``, read one position to its left; 0 on padding."""
    packed = PackedSequences.from_tokens(tokens)
    if remove_padding:
        outputs = packed_logits(model, packed.token_ids, packed.lengths)[packed.predictors]
    else:
        inputs, real = _padded(packed)
        outputs = model(**inputs).logits[real][packed.predictors]
    # float32 before the loss: returns of hundreds have steps of 1 or more in bfloat16.
    return packed.to_grid(outputs[:, 0].float())


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
