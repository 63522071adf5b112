"""The checkpoint folders of one run, written so that a crash at any moment leaves a complete checkpoint."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from verl_rc.config.files import open_inside, whole_or_absent
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.printable import printable


class CheckpointError(ValueError):
    """A failure to write, read or use a checkpoint; the message says what must hold, what was found and what
    to do, in one line: names in it come from files that somebody else may have written."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


def sync_tree(folder: Path) -> None:
    """``fsync`` ``folder`` and every file and folder below it."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """``fsync`` one file, or the entries of one folder but not the files in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


ResumeMode = Literal["auto", "disable", "resume_path"]
LATEST_FILE = "latest_checkpointed_iteration.txt"
"""File with the last committed step, for people and scripts; this package does not read it."""
COMMIT_NUMBER_FILE = "commit_number"
"""File inside a checkpoint with its commit number. Its presence seals the checkpoint."""
_PARTIAL, _REPLACED, _DELETED = ".partial", ".replaced", ".deleted"
_LONGEST_NUMBER = 20
"""Digits of a commit number."""
_CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")


class CheckpointStore:
    """``global_step_<N>`` folders of one run. One process writes; any may list.

    Checkpoints are ordered by commit, not by step: a run that starts from scratch or falls back to an older
    checkpoint reaches steps whose folders exist already.
    """

    def __init__(self, run_folder: Path, most: int | None) -> None:
        """``most``: number of newest checkpoints that stay on the disk (``trainer.max_actor_ckpt_to_keep``).
        None means all."""
        self.run_folder = run_folder
        self._most = most
        self.begun: int | None = None
        """Step of the checkpoint in progress, begun but not committed; None without one."""
        self._claim: FolderClaim | None = None

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of ``step``, after removing leftovers of a crash.

        The run's folder belongs to this process until the commit.
        """
        self._finish_interrupted_commit()
        partial = self._folder(step, _PARTIAL)
        partial.mkdir(parents=True)
        self.begun = step
        return partial

    def seal(self, step: int) -> None:
        """Mark the checkpoint as valid once its shards are complete, even if the run crashes before
        ``commit``.

        Raises ``CheckpointError`` when ``begin`` was not called.
        """
        partial = self._folder(step, _PARTIAL)
        if not partial.is_dir():
            raise CheckpointError(
                f"seal({step}) needs the folder that begin({step}) made, but {partial} is not there."
            )
        if _commit_number(partial):
            return
        self._own()
        for path in partial.iterdir():
            sync(path)
        (partial / COMMIT_NUMBER_FILE).write_text(
            f"{1 + max(map(_commit_number, self.newest_first()), default=0)}\n"
        )
        sync(partial / COMMIT_NUMBER_FILE)
        sync(partial)

    def commit(self, step: int) -> Path:
        """Make the folder of ``begin(step)`` the newest checkpoint, then delete those beyond ``keep``.

        The files reach the disk before the folder gets its name, and older checkpoints go last. Raises
        ``CheckpointError`` when ``begin`` was not called.
        """
        self._own()
        partial, final = self._folder(step, _PARTIAL), self._folder(step)
        sync_tree(partial)
        self.seal(step)
        replaced = self._folder(step, _REPLACED)
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        self.begun = None
        sync(self.run_folder)
        self._write_latest(step)
        shutil.rmtree(replaced, ignore_errors=True)
        self._delete_old()
        self.close()
        return final

    def close(self) -> None:
        """Give the run's folder up; a checkpoint in progress is left to the next run."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _own(self) -> None:
        """Own the run's folder before a change. Raises ``FolderTakenError`` or ``FolderLostError``."""
        if self._claim is None:
            self._claim = FolderClaim(self.run_folder, "checkpoints")
        self._claim.require()

    def newest_first(self) -> list[Path]:
        """Complete checkpoints, the last committed first."""
        if not self.run_folder.is_dir():
            return []
        folders = [
            path
            for path in self.run_folder.iterdir()
            if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()
        ]
        return sorted(folders, key=lambda folder: (_commit_number(folder), _step_of(folder)), reverse=True)

    def choose(
        self, mode: ResumeMode, path: str | None, is_readable: Callable[[Path], str | None]
    ) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from (None: start from scratch), and a message for every newer one that
        was skipped.

        ``mode`` is ``trainer.resume_mode``, ``path`` is ``trainer.resume_from_path``; ``is_readable`` returns
        None for a checkpoint that can be read, else the reason why not. Raises ``CheckpointError`` when
        checkpoints were asked for or found and none can be read: a run must not silently start from scratch;
        ``FolderTakenError`` when another run lives in the folder.
        """
        if mode == "disable":
            return None, []
        if mode == "resume_path":
            return _given_checkpoint(path, is_readable), []
        try:
            self._commit_sealed(is_readable)
            self._finish_interrupted_commit()
        finally:
            self.close()
        reasons: list[tuple[Path, str]] = []
        for folder in self.newest_first():
            reason = is_readable(folder)
            if reason is None:
                return folder, [
                    f"{passed} cannot be read ({why}); falling back to {folder}" for passed, why in reasons
                ]
            reasons.append((folder, reason))
        if not reasons:
            return None, []
        listed = "; ".join(f"{folder.name}: {reason}" for folder, reason in reasons)
        raise CheckpointError(
            f"trainer.resume_mode=auto needs a checkpoint that can be read in {self.run_folder}, but none "
            f"of {len(reasons)} can ({listed}). Repair one, give another folder with "
            "trainer.resume_mode=resume_path and trainer.resume_from_path, or start anew with "
            "trainer.resume_mode=disable."
        )

    def _folder(self, step: int, suffix: str = "") -> Path:
        return self.run_folder / f"global_step_{step}{suffix}"

    def _write_latest(self, step: int) -> None:
        with whole_or_absent(self.run_folder / LATEST_FILE) as file:
            file.write(f"{step}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        sync(self.run_folder)

    def _delete_old(self) -> None:
        """Delete old checkpoints; each is renamed first, because a half-deleted folder must not look like a
        checkpoint."""
        if self._most is None:
            return
        for folder in self.newest_first()[self._most :]:
            doomed = folder.with_name(f"{folder.name}{_DELETED}")
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _commit_sealed(self, is_readable: Callable[[Path], str | None]) -> None:
        """Commit a sealed checkpoint that was completely written before the run ended."""
        for partial in self.run_folder.glob(f"global_step_*{_PARTIAL}"):
            if _commit_number(partial) and is_readable(partial) is None:
                self.commit(_step_of(partial.with_suffix("")))

    def _finish_interrupted_commit(self) -> None:
        """Restore the name of a checkpoint that was moved aside unless its successor has it; delete other
        leftovers."""
        self._own()
        for replaced in self.run_folder.glob(f"global_step_*{_REPLACED}"):
            final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if not final.exists():
                os.rename(replaced, final)
        for suffix in (_PARTIAL, _REPLACED, _DELETED):
            for folder in self.run_folder.glob(f"global_step_*{suffix}"):
                shutil.rmtree(folder, ignore_errors=True)


def _given_checkpoint(path: str | None, is_readable: Callable[[Path], str | None]) -> Path:
    """The folder ``path``. Raises ``CheckpointError`` unless it is a readable checkpoint."""
    keys = (
        "trainer.resume_mode=resume_path needs trainer.resume_from_path to be a checkpoint folder "
        "(.../global_step_N)"
    )
    if path is None:
        raise CheckpointError(
            f"{keys}, got null. Name the folder, or use trainer.resume_mode=auto or disable."
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{keys}, but there is no folder {path!r}. Name one that exists.")
    if folder.name.endswith((_PARTIAL, _REPLACED, _DELETED)):
        raise CheckpointError(
            f"{keys}, but {path!r} was never finished or is being removed. Name a finished one."
        )
    reason = is_readable(folder)
    if reason is not None:
        raise CheckpointError(f"{keys} that can be read, but {path!r} cannot ({reason}). Name another one.")
    return folder


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _commit_number(folder: Path) -> int:
    """The commit number; 0 for folders without one, which are then ordered by step."""
    try:
        with open_inside(folder, folder / COMMIT_NUMBER_FILE) as file:
            return int(file.read(_LONGEST_NUMBER))
    except (OSError, ValueError):
        return 0
