"""Fingerprints of rows of tokens: by them a step detects that it trains on tokens that were not sampled."""

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_rc.records.batches import COLUMNS, FIELDS, TokenBatch, positions_mask, real_rows
from verl_rc.records.parts import Answer, Part, Sample, columns_of, num_tokens
from verl_rc.records.ragged_column import RaggedColumn

_SEED = 0x5EED
_OF_PICTURES = 0x5DEECE66D1CE4E5B
"""An odd factor."""
_TOKENS_AT_ONCE = 1 << 15
"""8-byte numbers of a block that fits into a core's cache: four to six times as fast as all rows at once."""


class TokensChangedError(RuntimeError):
    """The tokens of a row differ from the sampled ones."""


def fingerprints(tokens: TokenBatch, response_mask: Tensor) -> Tensor:
    """int64 ``[B]``: equal for rows with equal prompt, pictures, response, ``response_mask`` (bool
    ``[B, R]``) and lists beside the response; padding is ignored.

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
    total = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
    return total if tokens.pictures is None else total + tokens.pictures * _OF_PICTURES


def _fingerprints_of_lists(tokens: TokenBatch) -> Tensor:
    total = torch.zeros(len(tokens.responses), dtype=torch.int64)
    for number, name in enumerate(COLUMNS):
        counts, ids = getattr(tokens, f"{name}_counts"), getattr(tokens, f"{name}_ids")
        if counts is not None:
            total += (counts * _factors(counts.shape[1], 2 + number)).sum(-1)
            total += torch.tensor([_digest(row, number) for row in real_rows(ids, counts.sum(-1))])
    return total


def fingerprints_of_samples(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> Tensor:
    """int64 ``[B]``: the ``fingerprints`` of the batch of ``B`` prompts (token ids) and their samples,
    computed from the engines' results before any padding. The pictures are those that the engine read."""
    prompt_factors = _factors(max(map(len, prompts), default=0), 0)
    width = max((num_tokens(sample.parts) for sample in samples), default=0)
    totals = []
    for prompt, sample in zip(prompts, samples, strict=True):
        total = (torch.tensor(prompt).flip(0).add_(1) * prompt_factors[: len(prompt)]).sum()
        totals.append(int(total + _fingerprint_of_parts(sample.parts, width)))
    numbers = torch.tensor([sample.pictures for sample in samples], dtype=torch.int64)
    return torch.tensor(totals, dtype=torch.int64) + numbers * _OF_PICTURES


def _fingerprint_of_parts(parts: Sequence[Part | Answer], width: int) -> Tensor:
    """int64 ``[]``: fingerprint of a response of at most ``width`` tokens."""
    sizes = torch.tensor([len(part.token_ids) for part in parts], dtype=torch.int64)
    is_part = torch.tensor([isinstance(part, Part) for part in parts], dtype=torch.bool)
    ids = torch.cat([torch.empty(0, dtype=torch.int32), *(part.token_ids for part in parts)]).long()
    terms = ids.add_(1).mul_(2).add_(is_part.repeat_interleave(sizes))
    total = terms.mul_(_factors(width, 1)[: len(terms)]).sum()
    for number, name in enumerate(COLUMNS):
        if any(name in columns_of(part) for part in parts):
            column = RaggedColumn.joined(
                [columns_of(part).get(name) or RaggedColumn.empty(len(part.token_ids)) for part in parts]
            )
            total += (torch.tensor(column.counts) * _factors(width, 2 + number)[: len(terms)]).sum()
            total += _digest(torch.tensor(column.values, dtype=FIELDS[f"{name}_ids"][0]), number)
    return total


def _digest(values: Tensor, stream: int) -> int:
    """int64: BLAKE2b of the values' bytes, which needs an eighth of the memory of multilinear hashing; 0
    without values."""
    if not len(values):
        return 0
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
