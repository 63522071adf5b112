"""A folder of shards: its header, its metadata and its tensors, read without a model, other ranks or
executing code from it."""

import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from verl_rc.config.files import open_inside
from verl_rc.runtime.checkpoint.checksums import FileSum, SummingFileSystem, require_whole
from verl_rc.runtime.checkpoint.description import file_lengths, read_description
from verl_rc.runtime.checkpoint.plain_pickle import RefusedPickleError
from verl_rc.runtime.checkpoint.saved_files import fields_in_one_line, in_one_line, read_json
from verl_rc.runtime.checkpoint.store import CheckpointError
from verl_rc.runtime.checkpoint.tensor_archive import FilePart, read_archive

DESCRIPTION_FILE = ".metadata"


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints, without its unpickling: tensors come into being, and nothing
    else."""

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        """``metadata``: what was read of the folder before. The file may be another one by now."""
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the folder, read once. Raises ``OSError`` or ``RefusedPickleError``."""
        if self._metadata is None:
            with open_inside(self._folder, self._folder / DESCRIPTION_FILE) as file:
                self._metadata = read_description(file.read())
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of ``plan``."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open_inside(self._folder, self._folder / name) as file:
                for item in items:
                    if item.type is not LoadItemType.TENSOR:
                        raise RefusedPickleError(f"{name} must hold tensors alone; do not trust it")
                    place = self.storage_data[item.storage_index]
                    saved = read_archive(io.BufferedReader(FilePart(file, place.offset, place.length)))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(saved, item, target))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _part(saved: Any, item: ReadItem, target: Tensor) -> Tensor:
    """The part of a saved chunk that ``item`` reads."""
    if type(saved) is not Tensor or saved.dim() != len(item.lengths):
        raise RefusedPickleError(
            f"{item.storage_index.fqn} must be one tensor of {len(item.lengths)} dimension(s)"
        )
    part = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
    if part.shape != target.shape:
        raise RefusedPickleError(
            f"{item.storage_index.fqn} must have the shape {list(target.shape)}, got {list(part.shape)}"
        )
    return part


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
        try:
            return _HEADER.validate_json(json.dumps(plain), strict=True)
        except ValueError as error:
            raise CheckpointError(
                f"{path} must describe shards, but: {fields_in_one_line(error)}. Use another checkpoint."
            ) from error


_HEADER = TypeAdapter(ShardHeader)


def read_metadata(folder: Path) -> Metadata:
    """Names, shapes and storage of the tensors in ``folder``. Raises ``CheckpointError`` when they cannot be
    read."""
    with _readable(folder):
        metadata = SafeReader(folder).read_metadata()
        _require_bytes(folder, metadata)
    return metadata


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} must hold readable shards, but {in_one_line(error)}. Use another checkpoint."
        ) from error


def _require_bytes(folder: Path, metadata: Metadata) -> None:
    """Refuse a description of more bytes than its files have, before memory is taken for them."""
    for name, (total, end) in file_lengths(metadata).items():
        with open_inside(folder, folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        if max(total, end) > size:
            raise RefusedPickleError(f"{name} must have {max(total, end)} bytes for its tensors, got {size}")


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
    """The description of the shards in ``folder``, once they are whole. Raises ``CheckpointError``."""
    ShardHeader.read(folder)
    with _readable(folder):
        metadata = SafeReader(folder).read_metadata()
    require_whole(folder)
    with _readable(folder):
        _require_bytes(folder, metadata)
    return metadata


def load_full_state_dict(folder: Path) -> dict[str, Tensor]:
    """The saved model's full tensors by parameter name, on the CPU, without a process group.

    A tensor that several modules share appears once, under its first name; frozen ones only if they were
    saved. Raises ``CheckpointError`` when the folder cannot be read.
    """
    metadata = _read_description(folder)
    tensors = {
        f"{MODEL}{name}": torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved_tensors(metadata, MODEL).items()
    }
    read_tensors(folder, metadata, tensors, collective=False)
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


def read_tensors(folder: Path, metadata: Metadata, tensors: dict[str, Tensor], collective: bool) -> None:
    """Fill ``tensors`` from ``folder``, which ``metadata`` describes, in place, as a collective or in this
    process alone. Raises ``CheckpointError``."""
    with _one_line_per_failure(f"reading the shards in {folder}", alone=not collective):
        dcp.load(tensors, storage_reader=SafeReader(folder, metadata), no_dist=not collective)


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
