"""The tensors of a weight update: names, shapes, wire dtypes, buckets and digests of the bytes."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_WORDS_PER_CHUNK = 1 << 20
# Odd: multiplication by an odd number is a bijection modulo 2**64, so each changed word changes the digest.
_POSITION_FACTOR = 0x1E3779B97F4A7C15
_POSITION_OFFSET = 0x3C6EF372FE94F82B


FACTORS = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of an adapter's tensors: its layer computes ``x @ A.T @ B.T`` beside ``x @ W.T``."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an update on the wire."""

    name: str
    dtype: str
    """Name of the torch dtype on the wire, e.g. ``bfloat16``."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The wire dtype as a torch dtype."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.num_elements * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The ordered list of tensors of a weight update."""

    tensors: tuple[TensorSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names in sending order."""
        return tuple(spec.name for spec in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the update."""
        return sum(spec.num_bytes for spec in self.tensors)

    def without(self, names: Collection[str]) -> "Manifest":
        """The manifest without the tensors of these names."""
        return Manifest(tuple(spec for spec in self.tensors if spec.name not in names))

    def buckets(self, max_bytes: int) -> Iterator[list[TensorSpec]]:
        """Consecutive tensors of one dtype, at most ``max_bytes`` together (a larger single tensor travels
        alone)."""
        bucket: list[TensorSpec] = []
        size = 0
        for spec in self.tensors:
            # One dtype a bucket: it then travels as one flat tensor.
            if bucket and (size + spec.num_bytes > max_bytes or spec.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(spec)
            size += spec.num_bytes
        if bucket:
            yield bucket


def is_adapter(name: str) -> bool:
    """Whether this is the name of a LoRA adapter's factor."""
    return name.endswith(FACTORS)


def tensor_digest(tensor: Tensor) -> int:
    """A 64-bit digest of a tensor's bytes and their positions, computed where the tensor lies.

    ``sum_i word_i * (factor * i + offset | 1)`` modulo 2**64 over the 4-byte words (zero-padded), a
    multilinear hash: it sees any single changed word, any swap of two different words, and changes of several
    words unless they cancel by chance. It guards against faults, not against an adversary.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    bytes_missing = -data.numel() % 4
    if bytes_missing:
        data = torch.cat([data, data.new_zeros(bytes_missing)])
    # view(int32) needs memory that starts at a multiple of 4 bytes; a slice of a bucket starts at any
    # element. A clone starts at a new allocation, which is aligned.
    words = data.view(torch.int32) if data.data_ptr() % 4 == 0 else data.clone().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # In chunks: the positions of all words would take as much memory as the tensor itself.
    for start in range(0, words.numel(), _WORDS_PER_CHUNK):
        # Not words of 8 bytes: two changed signs would cancel, since 2**63 times the sum of two odd factors
        # is 0 modulo 2**64.
        chunk = words[start : start + _WORDS_PER_CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=words.device)
        # int64 wraps around modulo 2**64 on every device, so the sum does not depend on the order of its
        # terms: trainer and engine get the same digest on different hardware.
        total += (chunk * ((position * _POSITION_FACTOR + _POSITION_OFFSET) | 1)).sum()
    # The padding adds 0 to the sum: the length distinguishes tensors with more or fewer zeros at the end.
    return int(total) ^ (tensor.numel() << 1)
