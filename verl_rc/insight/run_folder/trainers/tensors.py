"""Pickles of tensors, read without torch and without running what they name.

A pickle may name any function, which loading would call. Here names are looked up in a short list, and a file
that names anything else is refused.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verl_rc.data.token_record import Array, DamagedRecordError
from verl_rc.insight.run_folder.token_files import refused_as

_DTYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
"""numpy's dtypes of torch's types of storage, by their names."""


class Opaque:
    """A placeholder for an object of a file that is not read."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class Mapped(dict[Any, Any]):
    """Stands for a class of another trainer that is a mapping; keeps its state."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class ArrayUnpickler(pickle.Unpickler):
    """Loads mappings, lists, numbers, text and tensors. Classes of the packages ``mappings`` become
    ``Mapped``."""

    def __init__(
        self, file: BinaryIO, archive: zipfile.ZipFile | None, mappings: tuple[str, ...] = ()
    ) -> None:
        super().__init__(file)
        self._archive, self._mappings = archive, mappings

    def find_class(self, module: str, name: str) -> Any:
        """The object behind a name; a type of storage stays a name. Raises ``DamagedRecordError`` for a name
        that is no part of an array."""
        package = module.partition(".")[0]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) in {
            ("torch.storage", "_load_from_bytes"),
            ("torch", "device"),
        } or package == "numpy":
            return Opaque
        if package in self._mappings:
            return Mapped
        raise DamagedRecordError(f"it names {module}.{name}, which is no array: refused, nothing was run")

    def persistent_load(self, identity: Any) -> Any:
        """The numbers of a storage, from the archive."""
        kind, storage_type, key, *_ = identity
        if kind != "storage" or self._archive is None or storage_type not in _DTYPES:
            raise DamagedRecordError("it refers to something that is no storage of a tensor")
        (name,) = [member for member in self._archive.namelist() if member.endswith(f"/data/{key}")]
        numbers = np.frombuffer(self._archive.read(name), _DTYPES[storage_type])
        is_bfloat16 = storage_type == "BFloat16Storage"
        return (numbers.astype("<u4") << 16).view("<f4") if is_bfloat16 else numbers


def _tensor(storage: Any, offset: int, size: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Any:
    """An array, or ``Opaque`` where the storage is not looked at."""
    if not isinstance(storage, np.ndarray):
        return Opaque()
    last = offset + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    if 0 in size:
        return np.zeros(size, storage.dtype)
    if min(offset, *size, *strides, 0) < 0 or max(last, math.prod(size) - 1) >= len(storage):
        raise DamagedRecordError("a tensor reaches beyond its storage")
    steps = tuple(stride * storage.itemsize for stride in strides)
    view: Array = np.lib.stride_tricks.as_strided(storage[offset:], size, steps)
    return view.copy()


def load_tensors(file: Path | bytes) -> Any:
    """What ``torch.save`` wrote. Raises ``DamagedRecordError`` for a file that is none, or names more."""
    source = io.BytesIO(file) if isinstance(file, bytes) else file
    with refused_as("it is no file of torch.save", *_UNREADABLE), zipfile.ZipFile(source) as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return ArrayUnpickler(io.BytesIO(archive.read(pickled)), archive).load()


def load_mapping(path: Path, modules: tuple[str, ...]) -> Mapped:
    """A pickle of a mapping of another trainer, whose classes are in the packages ``modules``. Raises as
    ``load_tensors`` does."""
    with refused_as("it is no pickle", *_UNREADABLE), path.open("rb") as file:
        mapping = ArrayUnpickler(file, None, modules).load()
    if not isinstance(mapping, Mapped):
        raise DamagedRecordError(f"it must hold a batch of {' or '.join(modules)}")
    return mapping


_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    OSError,
    ImportError,
    RecursionError,
)
