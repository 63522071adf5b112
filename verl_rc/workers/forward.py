"""One forward pass over prompts and responses: the log-prob (and entropy) of every response token."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl_rc.data.batches import TokenBatch, TokenScores, positions_mask
from verl_rc.tensor_ops import entropy_from_logits, log_probs_from_logits
from verl_rc.workers.language_model import packed_logits, padded_logits


@dataclass(frozen=True)
class ForwardOptions:
    """How a forward pass runs; results do not depend on it beyond rounding, save for the temperature."""

    temperature: float
    """Logits are divided by it, as the sampler does."""
    remove_padding: bool = True
    """Pack real tokens of all rows instead of padding every row to the longest."""


def score_tokens(model: nn.Module, tokens: TokenBatch, options: ForwardOptions, with_entropy: bool) -> TokenScores:
    """Log-probs of the response tokens under ``model``: position t is read from the hidden state one to its left."""
    logits, grid = _response_logits(model, tokens, options.remove_padding)
    targets = tokens.responses[grid]
    log_probs = log_probs_from_logits(logits, targets, temperature=options.temperature)
    entropys = entropy_from_logits(logits, temperature=options.temperature) if with_entropy else None
    return TokenScores(_on_grid(log_probs, grid), None if entropys is None else _on_grid(entropys, grid))


def _response_logits(model: nn.Module, tokens: TokenBatch, remove_padding: bool) -> tuple[Tensor, Tensor]:
    """Logits ``[K, V]`` that predict the K response tokens, and the bool ``[B, R]`` grid that says which those are."""
    prompt_width, response_width = tokens.prompts.shape[1], tokens.responses.shape[1]
    is_prompt = positions_mask(tokens.prompt_lengths, prompt_width).flip(-1)
    is_response = positions_mask(tokens.response_lengths, response_width)
    real = torch.cat([is_prompt, is_response], dim=-1)
    token_ids = torch.cat([tokens.prompts, tokens.responses], dim=-1)[real]
    response_token = torch.cat([torch.zeros_like(is_prompt), is_response], dim=-1)[real]
    predictors = response_token.nonzero()[:, 0] - 1
    lengths = tokens.sequence_lengths
    if remove_padding:
        return packed_logits(model, token_ids, lengths, keep=predictors), is_response
    right_padded = positions_mask(lengths, int(lengths.max()))
    padded_ids = torch.zeros(right_padded.shape, dtype=torch.int64, device=token_ids.device)
    padded_ids[right_padded] = token_ids
    return padded_logits(model, padded_ids, right_padded)[right_padded][predictors], is_response


def _on_grid(values: Tensor, grid: Tensor) -> Tensor:
    return torch.zeros(grid.shape, dtype=values.dtype, device=values.device).masked_scatter(grid, values)
