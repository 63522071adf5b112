"""Sizes and checksums of the files in a folder of a checkpoint, written beside them, by which damage is found
before anything is loaded."""

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import Buffer

from verl_rc.config.files import open_inside
from verl_rc.runtime.checkpoint.saved_files import missing
from verl_rc.runtime.checkpoint.store import CheckpointError, sync

CHECKSUM_FILE = "checksums.json"
_BLOCK = 1 << 20
_MOST_READERS = 8


@dataclass(frozen=True)
class FileSum:
    """Size and checksum that a file must have."""

    size: int
    """Bytes."""
    crc32: int

    @classmethod
    def of(cls, path: Path) -> "FileSum":
        """Size and checksum of a file on the disk."""
        size, crc = 0, 0
        with open_inside(path.parent, path) as file:
            while block := file.read(_BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return cls(size, crc)


_SUMS = TypeAdapter(dict[str, FileSum])


class _SummedFile(io.BufferedWriter):
    """A new file that sums what is written to it, from its begin to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sum = FileSum(0, 0)

    def write(self, data: Buffer) -> int:
        size = super().write(data)
        self.sum = FileSum(self.sum.size + size, zlib.crc32(data, self.sum.crc32))
        return size


class SummingFileSystem(FileSystem):
    """The disk, for torch's writer of shards; sums every file while it is written."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        """Sums by file name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file to be written."""
        assert mode == "wb"
        with _SummedFile(Path(path)) as file:
            yield file
        self.sums[Path(path).name] = file.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


def write_checksums(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write ``checksums.json``, on the disk for sure."""
    plain = {name: asdict(found) for name, found in sorted(sums.items())}
    (folder / CHECKSUM_FILE).write_text(json.dumps(plain, indent=1), encoding="utf-8")
    sync(folder / CHECKSUM_FILE)


def require_whole(folder: Path) -> None:
    """Raise ``CheckpointError`` unless every file of ``folder`` is as it was written; reads all of them."""
    try:
        reason = _damage(folder)
    except FileNotFoundError as error:
        raise missing(Path(error.filename)) from None
    except OSError as error:
        reason = f"{folder} must be readable, but: {error}"
    except ValueError:
        reason = f"{folder / CHECKSUM_FILE} must hold sizes and checksums, and is damaged"
    if reason is not None:
        raise CheckpointError(f"{reason}. Use another checkpoint.")


def _damage(folder: Path) -> str | None:
    with open_inside(folder, folder / CHECKSUM_FILE) as file:
        sums = _SUMS.validate_json(file.read())
    if any(name != Path(name).name for name in sums):
        return f"{folder / CHECKSUM_FILE} must name files of its folder alone"
    for name, expected in sums.items():
        size = (folder / name).stat().st_size
        if size != expected.size:
            return f"{folder / name} must have {expected.size} bytes, got {size}"
    with ThreadPoolExecutor(min(_MOST_READERS, os.cpu_count() or 1)) as pool:
        for name, found in zip(sums, pool.map(FileSum.of, [folder / name for name in sums]), strict=True):
            if found != sums[name]:
                return (
                    f"{folder / name} must be as it was written, but its checksum is {found.crc32:08x} "
                    f"instead of {sums[name].crc32:08x}"
                )
    return None
