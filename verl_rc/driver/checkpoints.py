"""Writing a run down every so often, and going on with one."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_rc.checkpoint import CheckpointError, CheckpointStore, RunState, check_same_model, shards_problem
from verl_rc.cluster.remote import RemoteError, wait_for_all
from verl_rc.cluster.trainer_groups import ActorGroup, CriticGroup
from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig
from verl_rc.config.secrets import public_values
from verl_rc.driver.announce import say
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a run goes on from."""

    folder: Path
    state: RunState


def choose(config: RunConfig, run_folder: Path) -> tuple[CheckpointStore, Resumed | None]:
    """The run's checkpoints, and the one to go on from as ``trainer.resume_mode`` says; None: start anew.

    Raises ``ConfigError`` when there is none that fits this run.
    """
    trainer = config.trainer
    store = CheckpointStore(run_folder, trainer.max_actor_ckpt_to_keep)
    try:
        folder, messages = store.choose(
            trainer.resume_mode, trainer.resume_from_path, lambda folder: _problem(folder, config)
        )
        for message in messages:
            say("%s", message)
        if folder is None:
            return store, None
        state = RunState.load(folder)
        check_same_model(state.config, config.model_dump(mode="json"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    say("going on from %s: %d steps are done", folder, state.step)
    return store, Resumed(folder, state)


def _problem(folder: Path, config: RunConfig) -> str | None:
    """Why a checkpoint cannot be used, if it cannot."""
    try:
        RunState.load(folder)
    except CheckpointError as error:
        return str(error)
    problem = shards_problem(folder / "actor")
    if problem is None and config.needs_critic:
        problem = shards_problem(folder / "critic")
    return problem


def restore(run: Run, resumed: Resumed) -> None:
    """Set everything in the driver as it was; models and data have been loaded before."""
    state, progress = resumed.state, run.progress
    progress.step = state.step
    progress.control = progress.control.resumed(state.control)
    run.skipped_updates.in_a_row = state.skipped_in_a_row
    run.nonfinite_updates.in_a_row.update(state.nonfinite_in_a_row)
    run.reward_watch.load_state(state.reward_watch)
    run.gap_monitor.calibrated = state.gap_limits["rollouts"]
    run.canary_monitor.calibrated = state.gap_limits["canary"]


def write(run: Run, step: int, record: StepRecord) -> None:
    """Write a checkpoint of the step beside its place, if one is due; ``commit`` puts it there.

    One is due every ``trainer.save_freq`` steps, at the end, and when the run was asked to stop; never if that is <= 0, unless an
    alert ends the run. With ``checkpoint.async_save`` it is only copied here, once the one before is written.
    """
    frequency = run.config.trainer.save_freq
    wanted = run.stop.settle() and (frequency > 0 or run.stop.reason is not None)
    if not run.is_due(frequency, step) and not wanted:
        return
    with record.stage("save_checkpoint"):
        _commit_begun(run, wait=True)
        with _explained(run, step):
            folder = run.checkpoints.begin(step).resolve()
            pending = [pending for group in _learners(run) for pending in group.save(folder / group.role)]
            _state_after(run, step).save(folder)
            wait_for_all(pending)


def commit(run: Run, step: int) -> None:
    """Make what was written count, now that the step's metrics are written too: a crash before this repeats the step.

    What is still being written counts after a later step; after the last one it is waited for.
    """
    if run.checkpoints.begun == step:  # the step is saved: who asked meanwhile need not wait for another
        run.stop.settle()
    _commit_begun(run, wait=run.stop.settled or step == run.total_steps)


def _commit_begun(run: Run, wait: bool) -> None:
    step = run.checkpoints.begun
    if step is None:
        return
    with _explained(run, step):
        if all(wait_for_all([pending for group in _learners(run) for pending in group.has_saved(wait)])):
            run.checkpoints.commit(step)
        else:
            run.checkpoints.seal(step)


def _learners(run: Run) -> list[ActorGroup | CriticGroup]:
    return [run.actor] if run.critic is None else [run.actor, run.critic]


@contextmanager
def _explained(run: Run, step: int) -> Iterator[None]:
    """What went wrong with the disk says what is left: the checkpoints before, which a failed one does not touch."""
    try:
        yield
    except (OSError, CheckpointError, RemoteError) as error:
        cause = error.cause if isinstance(error, RemoteError) else error
        if not isinstance(cause, (OSError, CheckpointError)):
            raise
        raise CheckpointError(
            f"the checkpoint of step {step} must be written to {run.folder}, but: {cause} {_what_is_left(run)}"
        ) from error


@contextmanager
def full_disk_explained(run: Run) -> Iterator[None]:
    """A disk that has no room for metrics or samples ends the run as one that has none for a checkpoint does."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"the disk must have room for what the run writes to {run.folder}, but: {error}. {_what_is_left(run)}"
        ) from error


def _what_is_left(run: Run) -> str:
    newest = next(iter(run.checkpoints.newest_first()), None)
    left = "There is no earlier checkpoint" if newest is None else f"{newest} is still the newest one, whole and usable"
    return f"{left}. Make room (fewer checkpoints: trainer.max_actor_ckpt_to_keep) and start the same command again."


def _state_after(run: Run, step: int) -> RunState:
    return RunState(
        step=step,
        loader=run.prompts.state_dict(),
        control=run.progress.control.state(),
        gap_limits={"rollouts": run.gap_monitor.calibrated, "canary": run.canary_monitor.calibrated},
        skipped_in_a_row=run.skipped_updates.in_a_row,
        nonfinite_in_a_row=dict(run.nonfinite_updates.in_a_row),
        reward_watch=run.reward_watch.state(),
        tracker_run_id=run.tracker.run_id,
        num_ranks=run.actor.num_ranks,
        config=public_values(run.config),
    )
