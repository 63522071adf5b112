"""Whether a folder can be written to, found out before a run starts and without leaving anything behind."""

import argparse
import errno
import os
import tempfile
from pathlib import Path


def why_unwritable(folder: Path) -> str | None:
    """Why nothing can be written to ``folder``; None when it can be, or could be made. Nothing is made."""
    there = first_existing(folder)
    try:
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"1")
    except OSError as error:
        return f"{there}: {error.strerror or error}"
    return None


def first_existing(folder: Path) -> Path:
    """The folder itself, or the nearest of its parents that exists."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # Path.exists raises without permission


def folder_problem(key: str, folder: str | None) -> str | None:
    """What is wrong with the folder that ``key`` names for output, and what to do; None: nothing is."""
    reason = None if folder is None else why_unwritable(Path(folder))
    if reason is None:
        return None
    return f"{key} must be a folder that can be written to, got {folder!r} ({reason}). Pass another one: {key}=<folder>."


def output_folder(text: str) -> Path:
    """The folder that a command-line argument names for output; for ``type=`` of ``argparse``."""
    reason = why_unwritable(Path(text))
    if reason is not None:
        raise argparse.ArgumentTypeError(f"must be a folder that can be written to, got {text!r} ({reason}). Pass another one.")
    return Path(text)
