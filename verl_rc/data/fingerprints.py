"""Fingerprints of rows of tokens: by them a step notices that it trains on other tokens than were sampled."""

import functools
import hashlib

import torch
from torch import Tensor

from verl_rc.data.batches import COLUMNS, TokenBatch, positions_mask, real_rows

_SEED = 0x5EED
_TOKENS_AT_ONCE = 1 << 15
"""Number of 8-byte numbers per block, which fit into a core's cache: four to six times as fast as all rows at
once."""


class TokensChangedError(RuntimeError):
    """The tokens of a row differ from the sampled ones."""


def fingerprints(tokens: TokenBatch, response_mask: Tensor) -> Tensor:
    """int64 ``[B]``: equal for rows with equal prompt, response, ``response_mask`` (bool ``[B, R]``) and
    lists beside the response; padding is ignored.

    Multilinear hashing modulo 2^64 (Lemire and Kaser, arXiv:1202.4961): every position has a random factor of
    its own, so two rows that differ by token ids below 2^30 collide with a probability below 2^-32. The lists
    are hashed by BLAKE2b. Comparable on machines with the same torch.
    """
    prompt_width, width = tokens.prompts.shape[1], tokens.responses.shape[1]
    prompt_factors, factors = _factors(prompt_width, 0).flip(-1), _factors(width, 1)
    rows_at_once = max(1, _TOKENS_AT_ONCE // max(prompt_width, width))
    parts = []
    for start in range(0, len(response_mask), rows_at_once):
        rows = slice(start, start + rows_at_once)
        in_prompt = positions_mask(tokens.prompt_lengths[rows], prompt_width).flip(-1)
        written = positions_mask(tokens.response_lengths[rows], width)
        # 1 is added so that a token with id 0 counts
        prompt_terms = (tokens.prompts[rows] + 1).mul_(prompt_factors).mul_(in_prompt)
        response_terms = (
            (tokens.responses[rows] + 1).mul_(2).add_(response_mask[rows]).mul_(factors).mul_(written)
        )
        parts.append(prompt_terms.sum(-1) + response_terms.sum(-1) + _fingerprints_of_lists(tokens[rows]))
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _fingerprints_of_lists(tokens: TokenBatch) -> Tensor:
    total = torch.zeros(len(tokens.responses), dtype=torch.int64)
    for number, name in enumerate(COLUMNS):
        counts, ids = getattr(tokens, f"{name}_counts"), getattr(tokens, f"{name}_ids")
        if counts is not None:
            total += (counts * _factors(counts.shape[1], 2 + number)).sum(-1)
            total += torch.tensor([_digest(row, number) for row in real_rows(ids, counts.sum(-1))])
    return total


def _digest(values: Tensor, stream: int) -> int:
    """int64: BLAKE2b of the values' bytes, of which multilinear hashing would make 8 each."""
    digest = hashlib.blake2b(values.numpy().data, digest_size=8, salt=bytes([stream]))
    return int.from_bytes(digest.digest(), "little", signed=True)


def require_sampled_tokens(expected: Tensor, tokens: TokenBatch, response_mask: Tensor) -> None:
    """Raise ``TokensChangedError`` naming rows whose fingerprint differs from the ``expected`` one (int64
    ``[B]``), which was computed when the engine returned them."""
    changed = (fingerprints(tokens, response_mask) != expected).nonzero()[:, 0].tolist()
    if changed:
        raise TokensChangedError(
            "every row must be trained on with the token ids that were sampled, prompt, response and tool "
            f"tokens alike, but {len(changed)} of {len(expected)} rows have changed since they came from the "
            f"engine; the first are {changed[:5]}. Something between sampling and update rewrites rows, or "
            "mixes them up."
        )


@functools.lru_cache(maxsize=16)
def _factors(width: int, stream: int) -> Tensor:
    """int64 ``[width]``: random odd numbers; the factors of a narrower batch are a prefix of a wider
    batch's."""
    generator = torch.Generator().manual_seed(_SEED + stream)
    lowest = torch.iinfo(torch.int64).min
    return torch.randint(lowest, -lowest - 1, (width,), generator=generator) | 1
