"""``.metadata``, the description of a folder of shards: names and shapes of its tensors, and where they lie.

torch reads that file with ``pickle``, which runs any function that it names. Here it is read without, every
record is made anew of the numbers and texts in it, and a description that contradicts itself is refused:
torch would read past a tensor, or leave a part of it as it was.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from verl_rc.runtime.checkpoint.plain_pickle import Call, Name, RefusedPickleError, read_pickle
from verl_rc.runtime.checkpoint.tensor_archive import DTYPES, is_count, num_elements

_METADATA = "torch.distributed.checkpoint.metadata."
_STORAGE = "torch.distributed.checkpoint.filesystem."
_SIZE = "torch.Size"
_NAMES = {
    *DTYPES,
    _SIZE,
    "pathlib.PosixPath",
    "torch.serialization._get_layout",
    f"{_STORAGE}_StorageInfo",
    *(
        _METADATA + name
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def read_description(data: bytes) -> Metadata:
    """The description in a file ``.metadata``.

    Raises:
        RefusedPickleError: the file is damaged, holds anything but a description of tensors, or its chunks
            are not those of the tensors.
    """
    try:
        fields = _fields(read_pickle(data, _NAMES.__contains__), _METADATA + "Metadata")
        tensors: dict[str, Any] = {
            _text(name): _entry(entry) for name, entry in _dict(fields["state_dict_metadata"]).items()
        }
        places = {_index(key): _place(place) for key, place in _dict(fields["storage_data"]).items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, RefusedPickleError):
            raise
        raise RefusedPickleError(f"its description of tensors is damaged ({type(error).__name__})") from error
    for name, entry in tensors.items():
        _check(name, entry, places)
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def file_lengths(metadata: Metadata) -> dict[str, tuple[int, int]]:
    """Length of each file: bytes of all its parts together, and where the last of them ends."""
    lengths: dict[str, tuple[int, int]] = {}
    for place in metadata.storage_data.values():
        total, end = lengths.get(place.relative_path, (0, 0))
        lengths[place.relative_path] = (total + place.length, max(end, place.offset + place.length))
    return lengths


def _check(name: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]) -> None:
    """Refuse a tensor whose chunks are not whole, or do not lie where so many bytes are."""
    total, item = 0, entry.properties.dtype.itemsize
    for chunk in entry.chunks:
        count = num_elements(chunk.sizes)
        place = places.get(MetadataIndex(name, chunk.offsets))
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        fits = len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
        if not fits or any(end > size for end, size in zip(ends, entry.size, strict=True)):
            raise RefusedPickleError(f"a chunk of {name} lies outside the tensor")
        if place is None or place.length < count * item:
            raise RefusedPickleError(f"a chunk of {name} has fewer bytes than its numbers need")
        total += count
    if total != (expected := num_elements(entry.size)):
        raise RefusedPickleError(f"the chunks of {name} hold {total} numbers instead of {expected}")


def _fields(value: Any, name: str) -> Mapping[Any, Any]:
    """The attributes of a record of this name."""
    if type(value) is not Call or value.name != name or value.arguments:
        raise RefusedPickleError(f"it holds a {_kind(value)} where {name.rpartition('.')[2]} must be")
    return _dict(value.state)


def _kind(value: Any) -> str:
    return value.name if type(value) is Call else value.text if type(value) is Name else type(value).__name__


def _dict(value: Any) -> Mapping[Any, Any]:
    if type(value) is not dict:
        raise RefusedPickleError(f"it holds a {_kind(value)} where a mapping must be")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise RefusedPickleError(f"it holds a {_kind(value)} where a name must be")
    return value


def _size(value: Any) -> torch.Size:
    if type(value) is not Call or value.name != _SIZE:
        raise RefusedPickleError(f"it holds a {_kind(value)} where a size must be")
    (numbers,) = value.arguments
    return torch.Size([_number(number) for number in numbers])


def _number(value: Any) -> int:
    if not is_count(value):
        raise RefusedPickleError("a size or an offset is no whole number")
    return int(value)


def _entry(value: Any) -> TensorStorageMetadata:
    fields = _fields(value, _METADATA + "TensorStorageMetadata")
    properties = fields["properties"]
    if type(properties) is not Call or properties.name != _METADATA + "TensorProperties":
        raise RefusedPickleError(f"it holds a {_kind(properties)} where TensorProperties must be")
    dtype = DTYPES[properties.state[0].text]
    chunks = [_chunk(chunk) for chunk in fields["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(fields["size"]), chunks)


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _fields(value, _METADATA + "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, _METADATA + "MetadataIndex")
    return MetadataIndex(_text(fields["fqn"]), _size(fields["offset"]))


def _place(value: Any) -> _StorageInfo:
    """The place of a chunk, which must be a file of the folder itself, unchanged."""
    fields = _fields(value, _STORAGE + "_StorageInfo")
    name = _text(fields["relative_path"])
    if name in ("", ".", "..") or set("/\\\0") & set(name):
        raise RefusedPickleError("it names a file outside its folder; do not trust it")
    if fields.get("transform_descriptors"):
        raise RefusedPickleError("its tensors must be stored as they are, without transformations")
    return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))
