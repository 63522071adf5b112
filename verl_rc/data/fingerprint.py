"""A number per row that changes with any of its tokens: what was sampled must be what is trained on."""

import functools

import torch
from torch import Tensor

from verl_rc.data.batches import TokenBatch, positions_mask

_SEED = 0x5EED
_TOKENS_AT_ONCE = 1 << 15
"""So many 8-byte numbers stay in a core's cache: four to six times as fast as all rows at once."""


class TokensChangedError(RuntimeError):
    """The tokens of a row are not those that were sampled."""


def fingerprints(tokens: TokenBatch, response_mask: Tensor) -> Tensor:
    """int64 ``[B]``: equal for rows of equal prompts, responses and ``response_mask`` (bool ``[B, R]``), whatever the padding.

    Multilinear hashing modulo 2^64 (Lemire and Kaser, arXiv:1202.4961): every position has a random factor of its own, so two
    rows that differ by token ids below 2^30 collide with a probability below 2^-32. Comparable on machines with the same torch.
    """
    prompt_width, width = tokens.prompts.shape[1], tokens.responses.shape[1]
    prompt_factors, factors = _factors(prompt_width, 0).flip(-1), _factors(width, 1)
    rows_at_once = max(1, _TOKENS_AT_ONCE // max(prompt_width, width))
    parts = []
    for start in range(0, len(response_mask), rows_at_once):
        rows = slice(start, start + rows_at_once)
        in_prompt = positions_mask(tokens.prompt_lengths[rows], prompt_width).flip(-1)
        written = positions_mask(tokens.response_lengths[rows], width)
        # 1 is added so that a token with id 0 is not nothing
        of_prompt = (tokens.prompts[rows] + 1).mul_(prompt_factors).mul_(in_prompt)
        of_response = (tokens.responses[rows] + 1).mul_(2).add_(response_mask[rows]).mul_(factors).mul_(written)
        parts.append(of_prompt.sum(-1) + of_response.sum(-1))
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def require_sampled_tokens(expected: Tensor, tokens: TokenBatch, response_mask: Tensor) -> None:
    """Raise ``TokensChangedError`` naming rows whose fingerprint is not the ``expected`` one (int64 ``[B]``), taken when they
    came from the engine."""
    changed = (fingerprints(tokens, response_mask) != expected).nonzero()[:, 0].tolist()
    if changed:
        raise TokensChangedError(
            "every row must be trained on with the token ids that were sampled, prompt, response and tool tokens alike, but "
            f"{len(changed)} of {len(expected)} rows have changed since they came from the engine; the first are "
            f"{changed[:5]}. Something between sampling and update rewrites rows, or mixes them up."
        )


@functools.lru_cache(maxsize=16)
def _factors(width: int, stream: int) -> Tensor:
    """int64 ``[width]``: random odd numbers; those of a narrower batch are the first of a wider one's."""
    generator = torch.Generator().manual_seed(_SEED + stream)
    lowest = torch.iinfo(torch.int64).min
    drawn = [torch.randint(lowest, -lowest - 1, (1,), generator=generator) for _ in range(width)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *drawn]) | 1
