"""Planted faults of the way from trainer to engine are found before the next optimizer step, in the real loop."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from verl_rc.cluster.remote import wait_for_all
from verl_rc.driver import stages, weights
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.train_batch import build_train_batch
from verl_rc.weight_sync.proof import SyncProofError

_versions = count()


def publish(run: Run) -> int:
    version = next(_versions)
    weights.publish(run, version, StepRecord())
    return version


def evaluated_step(run: Run, version: int) -> None:
    """Everything of a step that comes before the optimizer; then the optimizer, which moves the weights."""
    record = StepRecord()
    _, prompts = run.prompts.draw()
    rollouts = stages.generate(run, prompts, step=version + 1, epoch=0, record=record)
    scored = stages.score(run, prompts, rollouts, record)
    evaluations = stages.evaluate(run, rollouts, record)
    batch = build_train_batch(rollouts, scored.scores, evaluations, run.config.algorithm, run.progress.control).batch
    batch.advantages = batch.response_mask.float()  # equal rewards would give no gradient
    stages.update_actor(run, batch, version + 1, record)


def plant(run: Run, fault: str | None) -> None:
    workers = [*run.engines._engines, *run.actor._ranks]
    wait_for_all([worker.call("plant", fault) for worker in workers])


@pytest.fixture
def healthy_run(faulty_run: Run) -> Iterator[Run]:
    """The run after one healthy step whose update is not published yet; healed afterwards."""
    evaluated_step(faulty_run, publish(faulty_run))
    yield faulty_run
    plant(faulty_run, None)


def test_a_healthy_step_passes_with_gaps_of_fp32_rounding(healthy_run: Run) -> None:
    record = StepRecord()
    version = next(_versions)
    weights.publish(healthy_run, version, record)
    assert record.metrics()["sync/canary_max_gap"] < 1e-4
    evaluated_step(healthy_run, version)


def test_a_sync_that_is_acknowledged_but_not_done(healthy_run: Run) -> None:
    plant(healthy_run, "skipped_sync")
    with pytest.raises(SyncProofError, match="canary tokens of rollout engine 0"):
        publish(healthy_run)


def test_a_skipped_sync_is_found_by_the_steps_own_rollouts_too(healthy_run: Run) -> None:
    plant(healthy_run, "skipped_sync")
    without_canary = replace(healthy_run, config=_without_canary(healthy_run))
    version = publish(without_canary)
    with pytest.raises(SyncProofError, match="this step's rollouts"):
        evaluated_step(without_canary, version)


def test_one_tensor_that_is_not_sent(healthy_run: Run) -> None:
    plant(healthy_run, "one_tensor_not_sent")
    with pytest.raises(SyncProofError, match=r"all 2[0-9] tensors must be sent, missing"):
        publish(replace(healthy_run, manifest=healthy_run.manifest))


def test_a_prefix_cache_that_is_not_reset(healthy_run: Run) -> None:
    plant(healthy_run, "stale_prefix_cache")
    with pytest.raises(SyncProofError, match="canary tokens"):
        publish(healthy_run)
    plant(healthy_run, None)


def test_another_temperature_in_the_engine(healthy_run: Run) -> None:
    version = publish(healthy_run)
    plant(healthy_run, "other_temperature")
    with pytest.raises(SyncProofError, match="this step's rollouts"):
        evaluated_step(healthy_run, version)


def test_an_engine_of_another_version(healthy_run: Run) -> None:
    version = publish(healthy_run)
    with pytest.raises(RuntimeError, match=rf"weight version {version + 1}"):
        evaluated_step(healthy_run, version + 1)


def _without_canary(run: Run) -> object:
    rollout = run.config.actor_rollout_ref.rollout
    proof = rollout.sync_proof.model_copy(update={"canary_freq": 0})
    changed = run.config.actor_rollout_ref.model_copy(update={"rollout": rollout.model_copy(update={"sync_proof": proof})})
    return run.config.model_copy(update={"actor_rollout_ref": changed})
