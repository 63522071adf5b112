"""Files of ``torch.save``, read without unpickling: plain values and tensors, or a refusal.

``torch.load(weights_only=True)`` makes objects of some thirty types, gives them attributes that the file
names, and allocates what the file asks for. A file of a checkpoint needs none of that.
"""

import io
import math
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from torch import Tensor
from typing_extensions import Buffer

from verl_rc.runtime.checkpoint.plain_pickle import Name, RefusedPickleError, read_pickle

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Data types by their name in a pickle."""
_STORAGES = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
    "torch.storage.UntypedStorage": torch.uint8,
}
_HOOKS = "collections.OrderedDict"
_TENSOR, _TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_NAMES = {_HOOKS, _TENSOR, _TENSOR_OF_DTYPE, *_STORAGES, *DTYPES}
_PICKLE = "data.pkl"
_BLOCK = 1 << 24
_MOST_DIMENSIONS = 64
_MOST_LEVELS = 100
_LEAVES = (bool, int, float, str, Tensor)


class FilePart(io.RawIOBase):
    """``size`` bytes of an open file from ``begin`` on, as a file of their own (torch's own view seeks to the
    wrong side of the end)."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place of the part; returns it."""
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"a place in a file must be at least 0, got {at}")
        self._at = at
        return at

    def readinto(self, buffer: Buffer, /) -> int:
        """Read what fits; returns the number of bytes, 0 at the end of the part."""
        self._file.seek(self._begin + self._at)
        part = memoryview(buffer)[: max(0, self._size - self._at)]
        count: int = self._file.readinto(part)  # type: ignore[attr-defined]
        self._at += count
        return count


def read_archive(file: IO[bytes]) -> Any:
    """The object that ``torch.save`` wrote, as None, numbers, text, lists, tuples, dicts and tensors on the
    CPU.

    Raises:
        RefusedPickleError: the file holds anything else, or is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries, size = archive.infolist(), file.seek(0, os.SEEK_END)
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
                sum(entry.file_size for entry in entries) > size
            ):
                raise RefusedPickleError("its records must be stored as they are, each once; do not trust it")
            value = _Archive(archive).read()
            _require_plain(value, 0, {})
            return value
    except RefusedPickleError:
        raise
    except Exception as error:  # a broken archive can raise anything
        raise RefusedPickleError(
            f"it holds something else than tensors, or is damaged ({type(error).__name__})"
        ) from error


class _Archive:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        pickles = [PurePosixPath(name) for name in archive.namelist() if name.endswith(f"/{_PICKLE}")]
        if len(pickles) != 1:
            raise RefusedPickleError(f"it must have one record {_PICKLE}, got {len(pickles)}")
        self._folder = pickles[0].parent
        self._bytes: dict[str, Tensor] = {}

    def read(self) -> Any:
        order = self._folder / "byteorder"
        if (
            str(order) in self._archive.NameToInfo
            and self._archive.read(str(order)) != sys.byteorder.encode()
        ):
            raise RefusedPickleError(
                f"its numbers must be in this machine's order of bytes, {sys.byteorder} endian"
            )
        data = self._archive.read(str(self._folder / _PICKLE))
        return read_pickle(data, _NAMES.__contains__, self._call, self._stored)

    def _stored(self, identity: Any) -> Tensor:
        """The flat tensor of a storage."""
        kind, name, key, _, count = identity
        if kind != "storage" or type(name) is not Name or not str(key).isdecimal() or type(count) is not int:
            raise RefusedPickleError("it has a storage without type, number or size; do not trust it")
        dtype = _STORAGES[name.text]
        if key not in self._bytes:
            self._bytes[key] = self._read(self._archive.getinfo(str(self._folder / "data" / key)))
        if len(self._bytes[key]) != count * dtype.itemsize:
            raise RefusedPickleError(f"its storage {key} has another size than it says")
        return self._bytes[key].view(dtype)

    def _read(self, entry: zipfile.ZipInfo) -> Tensor:
        data, end = bytearray(entry.file_size), 0
        with self._archive.open(entry) as record:
            while block := record.read(_BLOCK):
                data[end : end + len(block)] = block
                end += len(block)
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == _HOOKS and not arguments:
            return {}
        if name == _TENSOR:
            return _tensor(*arguments[:4])
        if name == _TENSOR_OF_DTYPE:
            flat, offset, size, stride, _, _, dtype, *_ = arguments
            return _tensor(_require_tensor(flat).view(DTYPES[dtype.text]), offset, size, stride)
        raise RefusedPickleError(f"it calls {name}; do not trust it")


def _require_plain(value: Any, depth: int, heights: dict[int, int]) -> int:
    """Refuse names, and containers that hold themselves or are too deep for those who read them.

    Returns the levels of containers in ``value``; ``heights`` has those of containers by ``id``.
    """
    if value is None or type(value) in _LEAVES:
        return 0
    if type(value) not in (list, tuple, dict):
        raise RefusedPickleError(f"it holds a {type(value).__name__} where a value must be; do not trust it")
    height = heights.get(id(value))
    if depth + (height or 0) > _MOST_LEVELS:
        raise RefusedPickleError(f"it has more than {_MOST_LEVELS} levels of containers; do not trust it")
    if height is None:
        items = [*value, *value.values()] if type(value) is dict else value
        height = 1 + max((_require_plain(item, depth + 1, heights) for item in items), default=0)
        heights[id(value)] = height
    return height


def is_count(value: Any) -> bool:
    """Whether a value is a number of elements or bytes that fits into memory's addresses."""
    return type(value) is int and 0 <= value < 1 << 62


def num_elements(size: Sequence[Any]) -> int:
    """The number of elements of a tensor. Raises ``RefusedPickleError`` for a size that no tensor has."""
    if (
        len(size) > _MOST_DIMENSIONS
        or not all(map(is_count, size))
        or not is_count(math.prod(filter(None, size)))
    ):
        raise RefusedPickleError("it has a tensor of a size that no tensor has; do not trust it")
    return math.prod(size)


def _require_tensor(value: Any) -> Tensor:
    if type(value) is not Tensor:
        raise RefusedPickleError("it makes a tensor of something else; do not trust it")
    return value


def _tensor(flat: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    """A view of a storage, within it and not larger."""
    flat = _require_tensor(flat)
    count = num_elements(size)
    if len(size) != len(stride) or any(not is_count(number) for number in (offset, *stride)):
        raise RefusedPickleError("it has a tensor without a place in its storage; do not trust it")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if count > flat.numel() or (count and last >= flat.numel()):
        raise RefusedPickleError("it has a tensor that is larger than its storage; do not trust it")
    view: Tensor = flat.as_strided(size, stride, offset if count else 0)
    return view
