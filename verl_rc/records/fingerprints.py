"""Fingerprints of rows of tokens: by them a step detects that it trains on tokens that were not sampled."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_rc.records.batches import COLUMNS, FIELDS
from verl_rc.records.parts import Part, Sample, columns_of
from verl_rc.records.ragged import Column, Ragged, rows_of
from verl_rc.records.ragged_column import RaggedColumn

_SEED = 0x5EED
_OF_PICTURES = 0x5DEECE66D1CE4E5B
"""An odd factor."""


class TokensChangedError(RuntimeError):
    """The tokens of a row differ from the sampled ones."""


def fingerprints(rows: Ragged[Any]) -> Tensor:
    """int64 ``[B]``: equal for rows with equal prompt, pictures, response, ``response_mask`` and lists beside
    the response.

    Multilinear hashing modulo 2^64 (Lemire and Kaser, arXiv:1202.4961): every position has a random factor of
    its own, so two rows that differ by token ids below 2^30 collide with a probability below 2^-32. The lists
    are hashed by BLAKE2b. Comparable on machines with the same torch.
    """

    def by_row(name: str, symbols: str) -> list[Column]:
        return rows_of(rows.columns[name], rows.lengths[symbols])

    fields = by_row("prompts", "BP"), by_row("responses", "BR"), by_row("response_mask", "BR")
    totals = [_fingerprint(*row) for row in zip(*fields, strict=True)]
    if (numbers := rows.columns.get("pictures")) is not None:
        totals = [
            total + number * _OF_PICTURES for total, number in zip(totals, numbers.tolist(), strict=True)
        ]
    for stream, (name, symbols) in enumerate(COLUMNS.items()):
        if f"{name}_counts" in rows.columns:
            lists = zip(by_row(f"{name}_counts", "BR"), by_row(f"{name}_ids", symbols), strict=True)
            totals = [
                total + _fingerprint_of_lists(*row, stream) for total, row in zip(totals, lists, strict=True)
            ]
    return _wrapped(totals)


def fingerprints_of_samples(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> Tensor:
    """int64 ``[B]``: the ``fingerprints`` of the batch of ``B`` prompts (token ids) and their samples,
    computed from the engines' results before they are joined. The pictures are those that the engine read."""
    totals = []
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = [part.token_ids.numpy() for part in sample.parts]
        sampled = np.repeat([isinstance(part, Part) for part in sample.parts], [len(one) for one in ids])
        total = _fingerprint(np.asarray(prompt), np.concatenate([*ids, _NO_IDS]), sampled)
        total += sample.pictures * _OF_PICTURES
        for stream, name in enumerate(COLUMNS):
            lists = [columns_of(part).get(name) for part in sample.parts]
            if any(one is not None for one in lists):
                column = RaggedColumn.joined(
                    [one or RaggedColumn.empty(len(own)) for one, own in zip(lists, ids, strict=True)]
                )
                values = column.values.astype(torch.empty(0, dtype=FIELDS[f"{name}_ids"][0]).numpy().dtype)
                total = total + _fingerprint_of_lists(column.counts, values, stream)
        totals.append(total)
    return _wrapped(totals)


def _wrapped(totals: Sequence[int]) -> Tensor:
    """int64 ``[B]``: the totals modulo 2^64."""
    return torch.tensor([(total + (1 << 63)) % (1 << 64) - (1 << 63) for total in totals], dtype=torch.int64)


_NO_IDS = np.zeros(0, np.int32)


def _fingerprint(prompt: Column, response: Column, sampled: Column) -> int:
    # 1 is added so that a token with id 0 counts
    prompt, terms = prompt + np.int64(1), (response + np.int64(1)) * 2 + sampled
    return int(prompt @ _factors(len(prompt), 0)) + int(terms @ _factors(len(terms), 1))


def _fingerprint_of_lists(counts: Column, ids: Column, stream: int) -> int:
    return int(counts.astype(np.int64) @ _factors(len(counts), 2 + stream)) + _digest(ids, stream)


def _digest(values: Column, stream: int) -> int:
    """BLAKE2b of the values' bytes, which needs an eighth of the memory of multilinear hashing; 0 without
    values."""
    if not len(values):
        return 0
    digest = hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=8, salt=bytes([stream]))
    return int.from_bytes(digest.digest(), "little", signed=True)


def require_sampled_tokens(expected: Tensor, rows: Ragged[Any]) -> None:
    """Raise ``TokensChangedError`` naming rows whose fingerprint differs from the ``expected`` one (int64
    ``[B]``), which was computed when the engine returned them."""
    changed = (fingerprints(rows) != expected).nonzero()[:, 0].tolist()
    if changed:
        raise TokensChangedError(
            "every row must be trained on with the token ids that were sampled, prompt, response and tool "
            f"tokens alike, but {len(changed)} of {len(expected)} rows have changed since they came from the "
            f"engine; the first are {changed[:5]}. Something between sampling and update rewrites rows, or "
            "mixes them up."
        )


def _factors(width: int, stream: int) -> Column:
    """int64 ``[width]``: random odd numbers; those of a shorter row are a prefix of those of a longer one."""
    most = 1 << max(width - 1, 1023).bit_length()
    return _random_odd(most, stream)[:width]


@functools.lru_cache(maxsize=16)
def _random_odd(width: int, stream: int) -> Column:
    generator = torch.Generator().manual_seed(_SEED + stream)
    lowest = torch.iinfo(torch.int64).min
    return (torch.randint(lowest, -lowest - 1, (width,), generator=generator) | 1).numpy()
