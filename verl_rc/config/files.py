"""Files in folders that somebody else may have written, or writes at the same time: opened without leaving
the folder, and written without following what was planted there."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL, EPERM
from pathlib import Path
from typing import BinaryIO


class RefusedFileError(OSError):
    """A file is not read; ``strerror`` says why."""


def open_inside(folder: Path | None, path: Path) -> BinaryIO:
    """Open a file below ``folder`` for reading. Links are followed where they stay below ``folder``.

    No component is a link when it is opened, so that a link planted in the meantime is not followed either.
    ``folder`` is None where the user has named the file itself, which may be a link to anywhere.

    Raises:
        FileNotFoundError: there is no such file.
        RefusedFileError: a link leaves ``folder``, or ``path`` is no regular file: a pipe would block its
            reader.
    """
    target = os.path.realpath(path)
    root = os.path.dirname(target) if folder is None else os.path.realpath(folder)
    if not _is_below(target, root):
        raise RefusedFileError(
            EPERM, f"it leaves {folder} by a link, which is not followed; copy the file there", str(path)
        )
    *parents, name = os.path.relpath(target, root).split(os.sep)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(root, flags | os.O_DIRECTORY)
    try:
        for parent in parents:
            descriptor = _below(descriptor, parent, flags | os.O_DIRECTORY)
        descriptor = _below(descriptor, name, flags | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RefusedFileError(EINVAL, "it must be a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        os.close(descriptor)
        raise type(error)(error.errno, error.strerror, str(path)) from None


def is_outside(folder: Path, path: Path) -> bool:
    """Whether a path that begins with ``folder`` leads out of it by a link."""
    return not _is_below(os.path.realpath(path), os.path.realpath(folder))


def _is_below(target: str, root: str) -> bool:
    """Whether one path without links lies below another."""
    return root != target and os.path.commonpath([root, target]) == root


def _below(folder: int, name: str, flags: int) -> int:
    """Open ``name`` in an open folder, which is closed where that succeeds."""
    descriptor = os.open(name, flags, dir_fd=folder)
    os.close(folder)
    return descriptor


@contextmanager
def whole_or_absent(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name ``path`` at the end of the block, and disappears after an error.

    Until then it has a name that nobody can foresee. A link at ``path`` is replaced, not followed.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with beside.open("xb") as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
