"""A folder of shards: its header, its metadata and its tensors, read without a model, other ranks or
executing code from it."""

import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from verl_rc.checkpoint.checksums import FileSum, SummingFileSystem, require_whole
from verl_rc.checkpoint.saved_files import in_one_line, read_json
from verl_rc.checkpoint.store import CheckpointError

_ALLOWED = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Names that may be unpickled from ``.metadata``, by module; dtypes (``torch.float32``, …) are allowed too.
"""


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints, whose file ``.metadata`` may name nothing but descriptions of
    tensors.

    torch 2.13 unpickles that file as it is, which runs any function it names.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the file. Raises ``pickle.UnpicklingError`` where it names or holds anything but a description
        of tensors."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: Metadata = _DescriptionUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(
                f"it holds a {type(metadata).__name__} where a description of tensors must be"
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _DescriptionUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no description of tensors needs; do not trust it"
        )


HEADER_FILE = "shards.json"
MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of tensor names in the folder: ``model.<parameter>`` and ``optimizer.<parameter>.<state>``."""


@dataclass(frozen=True)
class ShardHeader:
    """The description of a folder's tensors, in ``shards.json``."""

    frozen_left_out: bool
    """Whether parameters without gradient are missing from the folder."""
    optimizer_parameters: list[str]
    """Names of the optimizer's parameters."""
    learning_rates: list[float]
    """Learning rates of the optimizer's parameter groups."""
    extra: dict[str, Any]
    """Additional data of the caller."""

    def write(self, folder: Path) -> None:
        """Write ``shards.json``. Raises ``CheckpointError`` when ``extra`` is not JSON or shards are there
        already."""
        try:
            text = json.dumps(asdict(self), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra must be plain JSON data, but {error}. Convert it first.") from error
        try:
            with (folder / HEADER_FILE).open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise CheckpointError(
                f"shards are written into a new folder, but {folder} holds some. Name another."
            ) from None

    @classmethod
    def read(cls, folder: Path) -> "ShardHeader":
        """Read ``shards.json``. Raises ``CheckpointError`` when it is missing or broken."""
        path = folder / HEADER_FILE
        plain = read_json(path)
        names = {field.name for field in fields(cls)}
        if plain.keys() != names:
            raise CheckpointError(
                f"{path} must hold {sorted(names)} and nothing else. Use another checkpoint."
            )
        return cls(**plain)


def read_metadata(folder: Path) -> Metadata:
    """Names, shapes and storage of the tensors in ``folder``. Raises ``CheckpointError`` when they cannot be
    read."""
    try:
        return SafeReader(folder).read_metadata()
    except Exception as error:  # a broken pickle can raise anything
        raise CheckpointError(
            f"{folder} must hold readable shards, but {in_one_line(error)}. Use another checkpoint."
        ) from error


def saved_tensors(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of the tensors whose names begin with ``prefix``, by the rest of their names."""
    return {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def shards_problem(folder: Path) -> str | None:
    """The reason why the shards in ``folder`` cannot be read (missing, or not as they were written), or None;
    builds no tensor."""
    try:
        _read_description(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _read_description(folder: Path) -> Metadata:
    """What the whole shards in ``folder`` hold. Raises ``CheckpointError``."""
    ShardHeader.read(folder)
    metadata = read_metadata(folder)
    require_whole(folder)
    return metadata


def load_full_state_dict(folder: Path) -> dict[str, Tensor]:
    """The saved model's full tensors by parameter name, on the CPU, without a process group.

    A tensor that several modules share appears once, under its first name; frozen ones only if they were
    saved. Raises ``CheckpointError`` when the folder cannot be read.
    """
    saved = saved_tensors(_read_description(folder), MODEL)
    tensors = {
        f"{MODEL}{name}": torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
    }
    read_tensors(folder, tensors, collective=False)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def write_tensors(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, FileSum]:
    """Write ``tensors`` into ``folder``; a collective when a process group exists. Returns the sums of the
    files that this rank wrote. Raises ``CheckpointError``.

    The data is synced to disk on return. The file ``.metadata`` is written last, after the tensors of all
    ranks.
    """
    alone = not dist.is_initialized()
    writer = dcp.FileSystemWriter(folder)
    writer.fs = files = SummingFileSystem()
    with _one_line_per_failure(f"writing the shards in {folder}", alone):
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=alone)
    return files.sums


def read_tensors(folder: Path, tensors: dict[str, Tensor], collective: bool) -> None:
    """Fill ``tensors`` from ``folder`` in place, as a collective or in this process alone. Raises
    ``CheckpointError``."""
    with _one_line_per_failure(f"reading the shards in {folder}", alone=not collective):
        dcp.load(tensors, storage_reader=SafeReader(folder), no_dist=not collective)


@contextmanager
def _one_line_per_failure(doing: str, alone: bool) -> Iterator[None]:
    """Raise DCP's failure of the first rank as one line, without a stack trace per rank; hide its warning
    when ``alone``.

    DCP's exception is a ``BaseException``, which ``except Exception`` would not catch.
    """
    try:
        with (
            warnings.catch_warnings() if alone else nullcontext()
        ):  # ranks write in a thread, and filters are for all threads
            if alone:
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(
            f"{doing} must succeed on every rank, but {len(error.failures)} failed, first rank {rank} with "
            f"{in_one_line(cause)}. Check the disk, or use another checkpoint."
        ) from error
