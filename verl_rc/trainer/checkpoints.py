"""Writing checkpoints of a run, and resuming one."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import public_values
from verl_rc.runtime.checkpoint import (
    CheckpointError,
    CheckpointStore,
    RunState,
    SavedRun,
    check_settings,
    shards_problem,
    state_under,
)
from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.trainer.cluster.rank_group import RankGroup
from verl_rc.trainer.cluster.remote import wait_for_all
from verl_rc.trainer.log import log, log_wait
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord


def choose(config: RunConfig, run_folder: Path) -> tuple[CheckpointStore, Path | None, RunState]:
    """The store of the run's checkpoints, the one to resume by ``trainer.resume_mode`` (None: start anew),
    and the run's state.

    Raises ``ConfigError`` when there is none that fits this run.
    """
    trainer = config.trainer
    store = CheckpointStore(run_folder, trainer.max_actor_ckpt_to_keep)
    try:
        folder, messages = store.choose(
            trainer.resume_mode,
            trainer.resume_from_path,
            lambda folder: _problem(folder, config.needs_critic),
        )
        for message in messages:
            log("%s", message)
        if folder is None:
            return store, None, RunState()
        saved = SavedRun.load(folder)
        settings = public_values(config)
        check_settings(saved, settings)
        if config.needs_critic and not _has_critic(folder):
            raise CheckpointError(
                f"{folder} holds no critic, and algorithm.adv_estimator={config.algorithm.adv_estimator} "
                "trains one; resume with an estimator that needs none, or start anew with "
                "trainer.resume_mode=disable."
            )
        supply = saved.state.supply
        if supply is not None and supply.num_groups and config.async_training.is_synchronous:
            raise CheckpointError(
                f"the checkpoint holds {supply.num_groups} groups that were sampled ahead, which a "
                "synchronous run does not train on; resume with the async_training section it was written "
                "with, or start anew with trainer.resume_mode=disable."
            )
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    log("going on from %s: %d steps are done", folder, saved.state.step)
    state, changes = state_under(saved, settings)
    for change in changes:
        log("%s", change)
    return store, folder, state


def _problem(folder: Path, needs_critic: bool) -> str | None:
    """The reason why a checkpoint cannot be used, or None. Reads all of it: a rank that loads it would not
    notice every damage, and when it does, it is too late for another one."""
    with log_wait(f"the checksums of {folder}"):
        try:
            SavedRun.load(folder)
        except CheckpointError as error:
            return str(error)
        problem = shards_problem(folder / "actor")
        if problem is None and needs_critic and _has_critic(folder):
            problem = shards_problem(folder / "critic")
        if problem is None and (folder / "reference").is_dir():
            problem = shards_problem(folder / "reference")
        return problem


def _has_critic(folder: Path) -> bool:
    return (folder / "critic").is_dir()


def write(services: Services, state: RunState, record: StepRecord) -> None:
    """Write a checkpoint of ``state`` into a partial folder, if one is due; ``commit`` gives it its name.

    One is due every ``trainer.save_freq`` steps (rounded up to steps that publish), at the end, and when the
    run was asked to stop; with ``save_freq`` <= 0 only when an alert ends the run. With
    ``checkpoint.async_save`` it is only copied here, once the one before is written.
    """
    step, stop = state.step, services.stop
    stop.accept()
    saves_last_step = stop.accepted and (services.config.trainer.save_freq > 0 or stop.reason is not None)
    if not services.saves_at(step) and not saves_last_step:
        return
    with record.stage("save_checkpoint"):
        _commit_begun(services, wait=True)
        with _explained(services.checkpoints, step):
            folder = services.checkpoints.begin(step).resolve()
            pending = [
                pending for group in _saved_groups(services) for pending in group.save(folder / group.role)
            ]
            SavedRun(state, public_values(services.config), services.actor.num_ranks).save(folder)
            wait_for_all(pending)


def commit(services: Services, step: int) -> None:
    """Commit the written checkpoint, once the step's metrics are written: after a crash before this, the step
    is repeated.

    A checkpoint that is still being written is committed after a later step; after the last step it is
    waited for.
    """
    if services.checkpoints.begun == step:  # the step is saved: a request that came meanwhile need not wait
        services.stop.accept()
    _commit_begun(services, wait=services.stop.accepted or step == services.total_steps)


def _commit_begun(services: Services, wait: bool) -> None:
    step = services.checkpoints.begun
    if step is None:
        return
    with _explained(services.checkpoints, step):
        if all(
            wait_for_all([pending for group in _saved_groups(services) for pending in group.has_saved(wait)])
        ):
            services.checkpoints.commit(step)
        else:
            services.checkpoints.seal(step)


def _saved_groups(services: Services) -> list[RankGroup]:
    groups: list[RankGroup] = (
        [services.actor] if services.critic is None else [services.actor, services.critic]
    )
    return [*groups, services.frozen["reference"]] if services.config.refreshes_reference else groups


@contextmanager
def _explained(store: CheckpointStore, step: int) -> Iterator[None]:
    """Turn a failure of the disk into a ``CheckpointError`` that names the newest checkpoint, which it does
    not touch."""
    try:
        yield
    except (OSError, CheckpointError, RemoteError) as error:
        cause = error.cause if isinstance(error, RemoteError) else error
        if not isinstance(cause, (OSError, CheckpointError)):
            raise
        raise CheckpointError(
            f"the checkpoint of step {step} must be written to {store.run_folder}, but: {cause} "
            f"{_remedy(store)}"
        ) from error


@contextmanager
def full_disk_explained(store: CheckpointStore) -> Iterator[None]:
    """Turn the error of a full disk, met while writing metrics or samples, into a ``CheckpointError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"the disk must have room for what the run writes to {store.run_folder}, but: {error}. "
            f"{_remedy(store)}"
        ) from error


def _remedy(store: CheckpointStore) -> str:
    newest = next(iter(store.newest_first()), None)
    survivor = (
        "There is no earlier checkpoint"
        if newest is None
        else f"{newest} is still the newest one, whole and usable"
    )
    return (
        f"{survivor}. Make room (fewer checkpoints: trainer.max_actor_ckpt_to_keep) and start the same "
        "command again."
    )
