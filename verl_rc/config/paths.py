"""Files and folders that a configuration names: inputs must exist, outputs must be writable."""

import argparse
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig


def why_unwritable(folder: Path) -> str | None:
    """The reason why ``folder`` cannot be written to or created; None when it can be. Creates nothing."""
    parent = first_existing(folder)
    try:
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"1")
    except OSError as error:
        return f"{parent}: {error.strerror or error}"
    return None


def first_existing(folder: Path) -> Path:
    """The folder itself, or the nearest of its parents that exists."""
    folder = folder.expanduser().absolute()
    return next(
        path for path in (folder, *folder.parents) if os.path.exists(path)
    )  # Path.exists raises without permission


def folder_problem(key: str, folder: str) -> str | None:
    """The error message for an output folder that cannot be used; None when it can."""
    reason = why_unwritable(Path(folder))
    if reason is None:
        return None
    return (
        f"{key} must be a folder that can be written to, got {folder!r} ({reason}). Pass another one: "
        f"{key}=<folder>."
    )


def output_folders(config: RunConfig) -> dict[str, str]:
    """The folders that a run writes to, by key."""
    trainer = config.trainer
    folders = {
        "trainer.default_local_dir": trainer.default_local_dir,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    return {key: folder for key, folder in folders.items() if folder is not None}


def output_folder(text: str) -> Path:
    """Convert a command-line argument to a writable output folder; for ``type=`` of ``argparse``."""
    reason = why_unwritable(Path(text))
    if reason is not None:
        raise argparse.ArgumentTypeError(
            f"must be a folder that can be written to, got {text!r} ({reason}). Pass another one."
        )
    return Path(text)


def check_files(config: RunConfig) -> None:
    """Raise ``ConfigError`` when an input path does not exist or an output path cannot be written to."""
    own_class = config.data.custom_cls.path  # which may find its data in its own way
    paths: dict[str, Sequence[str | None]] = {
        "data.train_files": config.data.train_files if own_class is None else [],
        "data.val_files": config.data.val_files if own_class is None else [],
        "data.custom_cls.path": [own_class],
        "reward.custom_reward_function.path": [config.reward.custom_reward_function.path],
    }
    problems = [
        f"{key} must name existing files, {path!r} does not exist."
        for key, files in paths.items()
        for path in files
        if path is not None and not Path(path).expanduser().is_file()
    ]
    first_keys: dict[str, str] = {}
    for key, (path, _) in config.models.items():
        first_keys.setdefault(path, key)  # a path that several keys follow is named once
    problems += [
        f"{key} must be a Hugging Face model folder (with "
        f"config.json) or a hub id, got {path!r}. scripts/make_tiny_model.py writes a small one."
        for path, key in first_keys.items()
        if not _may_be_a_model(path)
    ]
    problems += [
        problem for key, folder in output_folders(config).items() if (problem := folder_problem(key, folder))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _may_be_a_model(path: str) -> bool:
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return is_hub_id or (Path(path).expanduser() / "config.json").is_file()
