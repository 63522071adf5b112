"""Making sure that what was written is on the disk, and survives a machine that loses power."""

import os
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Have the operating system write every file and folder below ``folder``, and itself, to the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """The same for one file or one folder: the names in it, not what they stand for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
