"""The checkpoints of one run as folders on disk: written so that a crash at any moment leaves a complete one."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used; the message says what must hold, what was found and what to do."""


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


ResumeMode = Literal["auto", "disable", "resume_path"]
LATEST_FILE = "latest_checkpointed_iteration.txt"
"""Holds the step that was committed last, for people and scripts; nothing here reads it."""
COMMIT_NUMBER_FILE = "commit_number"
"""Inside a checkpoint: how many commits the run folder had seen, itself included. It is what seals one."""
_PARTIAL, _REPLACED, _DELETED = ".partial", ".replaced", ".deleted"
_CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")


class CheckpointStore:
    """``global_step_<N>`` folders of one run. One process writes; any may list.

    A checkpoint is newer than another when it was committed later, whatever their steps: a run that starts anew, or
    falls back to an older checkpoint, passes steps whose folders exist already.
    """

    def __init__(self, run_folder: Path, keep: int | None) -> None:
        """``keep`` is how many of the newest checkpoints stay (``trainer.max_actor_ckpt_to_keep``); None: all."""
        if keep is not None and keep < 1:
            raise ValueError(
                f"trainer.max_actor_ckpt_to_keep must be at least 1, or null to keep every checkpoint, got {keep}. "
                "trainer.save_freq=-1 writes none."
            )
        self._run_folder = run_folder
        self._keep = keep
        self.begun: int | None = None
        """Step of the checkpoint that was begun and is not committed yet; None: there is none."""

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into; what a crash left behind is cleared away."""
        self._finish_interrupted_commit()
        partial = self._folder(step, _PARTIAL)
        partial.mkdir(parents=True)
        self.begun = step
        return partial

    def seal(self, step: int) -> None:
        """Let the checkpoint count as soon as it is whole, be it after a crash: nothing but its shards may still be on its way.

        Raises ``CheckpointError`` when ``begin`` was not called.
        """
        partial = self._folder(step, _PARTIAL)
        if not partial.is_dir():
            raise CheckpointError(f"seal({step}) needs the folder that begin({step}) made, but {partial} is not there.")
        if _commit_number(partial):
            return
        for path in partial.iterdir():
            sync(path)
        (partial / COMMIT_NUMBER_FILE).write_text(f"{1 + max(map(_commit_number, self.newest_first()), default=0)}\n")
        sync(partial / COMMIT_NUMBER_FILE)
        sync(partial)

    def commit(self, step: int) -> Path:
        """Make what was written since ``begin(step)`` the newest checkpoint, then delete those beyond ``keep``.

        The files reach the disk before the folder gets its name, and older checkpoints go last. Raises
        ``CheckpointError`` when ``begin`` was not called.
        """
        partial, final = self._folder(step, _PARTIAL), self._folder(step)
        sync_tree(partial)
        self.seal(step)
        replaced = self._folder(step, _REPLACED)
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        self.begun = None
        sync(self._run_folder)
        self._write_latest(step)
        shutil.rmtree(replaced, ignore_errors=True)
        self._delete_old()
        return final

    def newest_first(self) -> list[Path]:
        """Complete checkpoints, the one committed last first."""
        if not self._run_folder.is_dir():
            return []
        folders = [path for path in self._run_folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(folders, key=lambda folder: (_commit_number(folder), _step_of(folder)), reverse=True)

    def choose(
        self, mode: ResumeMode, path: str | None, is_readable: Callable[[Path], str | None]
    ) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from (None: start anew), and a message for every newer one that was passed over.

        ``mode`` is ``trainer.resume_mode``, ``path`` is ``trainer.resume_from_path``; ``is_readable`` returns None for a
        checkpoint that can be read, else the reason why not. Raises ``CheckpointError`` when checkpoints were asked
        for or found and none can be read: a run never starts anew by surprise.
        """
        if mode not in get_args(ResumeMode):
            raise CheckpointError(f"trainer.resume_mode must be one of {list(get_args(ResumeMode))}, got {mode!r}.")
        if mode == "disable":
            return None, []
        if mode == "resume_path":
            return _given_checkpoint(path, is_readable), []
        self._commit_sealed(is_readable)
        self._finish_interrupted_commit()
        reasons: list[tuple[Path, str]] = []
        for folder in self.newest_first():
            reason = is_readable(folder)
            if reason is None:
                return folder, [f"{passed} cannot be read ({why}); falling back to {folder}" for passed, why in reasons]
            reasons.append((folder, reason))
        if not reasons:
            return None, []
        listed = "; ".join(f"{folder.name}: {reason}" for folder, reason in reasons)
        raise CheckpointError(
            f"trainer.resume_mode=auto needs a checkpoint that can be read in {self._run_folder}, but none of "
            f"{len(reasons)} can ({listed}). Repair one, give another folder with trainer.resume_mode=resume_path and "
            "trainer.resume_from_path, or start anew with trainer.resume_mode=disable."
        )

    def _folder(self, step: int, suffix: str = "") -> Path:
        return self._run_folder / f"global_step_{step}{suffix}"

    def _write_latest(self, step: int) -> None:
        beside = self._run_folder / f"{LATEST_FILE}{_PARTIAL}"
        beside.write_text(f"{step}\n")
        sync(beside)
        os.replace(beside, self._run_folder / LATEST_FILE)
        sync(self._run_folder)

    def _delete_old(self) -> None:
        """Folders lose their name first: one that is half deleted must not look like a checkpoint."""
        if self._keep is None:
            return
        for folder in self.newest_first()[self._keep :]:
            doomed = folder.with_name(f"{folder.name}{_DELETED}")
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _commit_sealed(self, is_readable: Callable[[Path], str | None]) -> None:
        """Commit a checkpoint that was sealed and then written to its end, before the run could."""
        for partial in self._run_folder.glob(f"global_step_*{_PARTIAL}"):
            if _commit_number(partial) and is_readable(partial) is None:
                self.commit(_step_of(partial.with_suffix("")))

    def _finish_interrupted_commit(self) -> None:
        """Give a checkpoint that was moved aside its name back unless its successor took it; clear the rest away."""
        for replaced in self._run_folder.glob(f"global_step_*{_REPLACED}"):
            final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if not final.exists():
                os.rename(replaced, final)
        for suffix in (_PARTIAL, _REPLACED, _DELETED):
            for folder in self._run_folder.glob(f"global_step_*{suffix}"):
                shutil.rmtree(folder, ignore_errors=True)


def _given_checkpoint(path: str | None, is_readable: Callable[[Path], str | None]) -> Path:
    """The folder ``path``, refused unless it is a checkpoint that can be read."""
    keys = "trainer.resume_mode=resume_path needs trainer.resume_from_path to be a checkpoint folder (.../global_step_N)"
    if path is None:
        raise CheckpointError(f"{keys}, got null. Name the folder, or use trainer.resume_mode=auto or disable.")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{keys}, but there is no folder {path!r}. Name one that exists.")
    if folder.name.endswith((_PARTIAL, _REPLACED, _DELETED)):
        raise CheckpointError(f"{keys}, but {path!r} was never finished or is being removed. Name a finished one.")
    reason = is_readable(folder)
    if reason is not None:
        raise CheckpointError(f"{keys} that can be read, but {path!r} cannot ({reason}). Name another one.")
    return folder


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _commit_number(folder: Path) -> int:
    """The number written at commit; 0 for folders from elsewhere, which are then ordered by step."""
    try:
        return int((folder / COMMIT_NUMBER_FILE).read_text())
    except (OSError, ValueError):
        return 0
