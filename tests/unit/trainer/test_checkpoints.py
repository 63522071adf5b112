"""When a checkpoint counts, and a disk that is full while one is written: the message says what is left, and
that is used."""

import errno
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.runtime.checkpoint import CheckpointError, CheckpointStore
from verl_rc.runtime.checkpoint.run_state import RunState, SavedRun
from verl_rc.runtime.distributed.child_process import ProcessLostError, RemoteError
from verl_rc.trainer import checkpoints
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.stop import StopRequest

FULL = OSError(errno.ENOSPC, "No space left on device")
NOT_WRITTEN = CheckpointError(
    "writing the shards must succeed on every rank: OSError: No space left on device."
)


class Learner:
    """An actor whose shards are one small file, at once on the disk or when ``finish`` is called."""

    role = "actor"
    num_ranks = 1

    def __init__(self) -> None:
        self.is_async = False
        self.writing: Path | None = None
        self.error: RemoteError | None = None

    def save(self, folder: Path) -> list[Any]:
        assert self.writing is None
        folder.mkdir()
        self.writing = folder
        if not self.is_async:
            self.finish()
        return []

    def has_saved(self, wait: bool) -> list[Any]:
        if wait and self.writing is not None:
            self.finish()
        return [self]

    def finish(self) -> None:
        assert self.writing is not None
        (self.writing / "shards").write_text("weights")
        self.writing = None

    def answer(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.writing is None


def run_in(folder: Path) -> Services:
    run = SimpleNamespace(
        folder=folder,
        checkpoints=CheckpointStore(folder, None),
        config=SimpleNamespace(
            trainer=SimpleNamespace(save_freq=1),
            async_training=AsyncTrainingConfig(),
            refreshes_reference=False,
            model_dump=lambda mode: {},
        ),
        total_steps=9,
        stop=StopRequest(),
        actor=Learner(),
        critic=None,
    )
    run.is_due, run.saves_at = partial(Services.is_due, run), partial(Services.saves_at, run)
    return cast(Services, run)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    """A run with a checkpoint of step 1."""
    monkeypatch.setattr(checkpoints, "wait_for_all", lambda pending: [one.answer() for one in pending])
    run = run_in(tmp_path)
    save(run, 1)
    return run


def save(run: Services, step: int) -> None:
    checkpoints.write(run, RunState(step=step), StepRecord())
    checkpoints.commit(run, step)


def committed(run: Services) -> list[str]:
    return [path.name for path in run.checkpoints.newest_first()]


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
    run: Services, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        if where == "shards":
            patch.setattr(checkpoints, "wait_for_all", fail(error))
        elif where == "state":
            patch.setattr(SavedRun, "save", fail(error))
        else:
            patch.setattr("verl_rc.runtime.checkpoint.store.sync_tree", fail(error))
        with pytest.raises(
            CheckpointError,
            match=r"step 2 must .* No space left.*global_step_1 is still the newest one, whole",
        ):
            save(run, 2)
    run.checkpoints.close()  # as the run does at its end
    chosen, messages = CheckpointStore(run.folder, None).choose("auto", None, lambda folder: None)
    assert chosen == run.folder / "global_step_1"
    assert messages == []
    again = run_in(run.folder)
    save(again, 2)
    assert committed(again) == ["global_step_2", "global_step_1"]


def test_what_is_not_the_disks_fault_is_not_blamed_on_it(
    run: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = ProcessLostError("actor rank 0 died while it was to save")
    monkeypatch.setattr(checkpoints, "wait_for_all", fail(died))
    with pytest.raises(ProcessLostError) as caught:
        checkpoints.write(run, RunState(step=2), StepRecord())
    assert caught.value is died


@pytest.fixture
def actor(run: Services) -> Learner:
    """The run's actor, which from now on saves beside the steps."""
    actor = cast(Learner, run.actor)
    actor.is_async = True
    return actor


def test_a_checkpoint_counts_after_the_step_in_which_it_was_finished(run: Services, actor: Learner) -> None:
    save(run, 2)
    assert committed(run) == ["global_step_1"]
    run.config.trainer.save_freq = 100  # type: ignore[misc]
    save(run, 3)
    assert committed(run) == ["global_step_1"]
    actor.finish()
    save(run, 4)
    assert committed(run) == ["global_step_2", "global_step_1"]
    save(run, 5)
    assert run.checkpoints.begun is None


def test_the_next_save_waits_for_the_last(run: Services, actor: Learner) -> None:
    save(run, 2)
    save(run, 3)  # the actor refuses two at once
    assert committed(run) == ["global_step_2", "global_step_1"]
    assert run.checkpoints.begun == 3


def test_the_last_step_and_a_run_that_is_to_end_wait(run: Services, actor: Learner) -> None:
    save(run, 9)
    assert committed(run)[0] == "global_step_9"
    run.config.trainer.save_freq = 100  # type: ignore[misc]
    run.stop.requested = True
    save(run, 3)
    assert committed(run)[0] == "global_step_3"


def test_a_request_that_comes_after_the_save_began_ends_the_run_at_once_or_after_the_next_step(
    run: Services, actor: Learner
) -> None:
    checkpoints.write(run, RunState(step=2), StepRecord())
    run.stop.requested = True
    checkpoints.commit(run, 2)
    assert committed(run)[0] == "global_step_2"
    assert run.stop.accepted

    run.stop = StopRequest()  # type: ignore[misc]
    run.config.trainer.save_freq = 100  # type: ignore[misc]
    checkpoints.write(run, RunState(step=3), StepRecord())
    run.stop.requested = True
    checkpoints.commit(run, 3)
    run.stop.end_if_accepted()  # step 3 would be lost
    save(run, 4)
    assert committed(run)[0] == "global_step_4"
    with pytest.raises(SystemExit):
        run.stop.end_if_accepted()


def test_a_write_beside_the_steps_that_fails_is_told_like_any_other(run: Services, actor: Learner) -> None:
    save(run, 2)
    actor.error = RemoteError("actor rank 0 failed to has_saved", NOT_WRITTEN)
    with pytest.raises(
        CheckpointError, match=r"step 2 must .* No space left.*global_step_1 is still the newest one, whole"
    ):
        save(run, 3)
    run.checkpoints.close()  # as the run does at its end
    resumed = CheckpointStore(run.folder, None).choose(
        "auto", None, lambda folder: "no shards" if folder.suffix else None
    )
    assert resumed == (run.folder / "global_step_1", [])


def test_a_disk_that_is_full_of_other_things_is_told_the_same_way(run: Services) -> None:
    said = r"must have room .* No space left.*global_step_1 is still the newest one, whole"
    with pytest.raises(CheckpointError, match=said), checkpoints.full_disk_explained(run.checkpoints):
        raise FULL
    missing = FileNotFoundError(errno.ENOENT, "no such file")
    with pytest.raises(FileNotFoundError), checkpoints.full_disk_explained(run.checkpoints):
        raise missing
