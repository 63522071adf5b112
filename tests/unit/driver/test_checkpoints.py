"""A disk that is full while a checkpoint is written: the message says what is left, and what is left is used."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_rc.checkpoint import CheckpointError, CheckpointStore
from verl_rc.checkpoint.run_state import RunState
from verl_rc.cluster.remote import ProcessLostError, RemoteError
from verl_rc.driver import checkpoints
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord

FULL = OSError(errno.ENOSPC, "No space left on device")
NOT_WRITTEN = CheckpointError("writing the shards must succeed on every rank: OSError: No space left on device.")


class Learner:
    """An actor whose shards are one small file."""

    role = "actor"
    num_ranks = 1

    def save(self, folder: Path) -> list[Any]:
        folder.mkdir()
        (folder / "shards").write_text("weights")
        return []


def run_in(folder: Path) -> Run:
    run = SimpleNamespace(
        folder=folder,
        checkpoints=CheckpointStore(folder, None),
        config=SimpleNamespace(trainer=SimpleNamespace(save_freq=1), model_dump=lambda mode: {}),
        is_due=lambda frequency, step: True,
        stop=SimpleNamespace(came=False, reason=None),
        actor=Learner(),
        critic=None,
        prompts=SimpleNamespace(state_dict=dict),
        progress=SimpleNamespace(control=SimpleNamespace(state=dict)),
        gap_monitor=SimpleNamespace(calibrated=None),
        canary_monitor=SimpleNamespace(calibrated=None),
        skipped_updates=SimpleNamespace(in_a_row=0),
        tracker=SimpleNamespace(run_id=None),
    )
    return cast(Run, run)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a checkpoint of step 1."""
    run = run_in(tmp_path)
    save(run, 1)
    return run


def save(run: Run, step: int) -> None:
    assert checkpoints.write(run, step, StepRecord())
    checkpoints.commit(run, step)


def fail(error: BaseException) -> Any:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("shards", RemoteError("actor rank 0 failed to save", NOT_WRITTEN)),
        ("state", FULL),
        ("commit", FULL),
    ],
)
def test_a_full_disk_leaves_the_checkpoint_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        if where == "shards":
            patch.setattr(checkpoints, "wait_for_all", fail(error))
        elif where == "state":
            patch.setattr(RunState, "save", fail(error))
        else:
            patch.setattr("verl_rc.checkpoint.store._sync_tree", fail(error))
        with pytest.raises(CheckpointError, match=r"step 2 must .* No space left.*global_step_1 is still the newest one, whole"):
            save(run, 2)
    chosen, messages = CheckpointStore(run.folder, None).choose("auto", None, lambda folder: None)
    assert chosen == run.folder / "global_step_1"
    assert messages == []
    save(run, 2)
    assert [path.name for path in run.checkpoints.newest_first()] == ["global_step_2", "global_step_1"]


def test_what_is_not_the_disks_fault_is_not_blamed_on_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    died = ProcessLostError("actor rank 0 died while it was to save")
    monkeypatch.setattr(checkpoints, "wait_for_all", fail(died))
    with pytest.raises(ProcessLostError) as caught:
        checkpoints.write(run, 2, StepRecord())
    assert caught.value is died
