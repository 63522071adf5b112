"""The real loop with adapters in the engine: what is sent, what a new engine gets, and faults that the proofs
find."""

import os
import signal
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from real_steps import RealRun, move_weights, open_faulty_run, plant, real_step, with_values

from verl_rc.runtime.weight_sync.proof import SyncProofError
from verl_rc.trainer.cluster.watchdog import identity_of
from verl_rc.trainer.step_record import StepRecord

ADAPTERS = (
    "actor_rollout_ref.model.lora_rank=3",
    "actor_rollout_ref.model.lora_alpha=6",
    "actor_rollout_ref.model.lora.merge=False",
)
NO_CANARY = {"actor_rollout_ref.rollout.sync_proof.canary_freq": 0, "trainer.test_freq": -1}
INNER, OUTER, HEAD, LAYERS = 64, 96, 32, 2
"""Widths of the model: of hidden states, of the MLP, and of its two heads, one of which has keys."""
QUERIES, KEYS = 2 * HEAD, HEAD
SUMS = (INNER + QUERIES) * 2 + (INNER + KEYS) * 2 + (INNER + OUTER) * 3
"""Of the inputs and outputs of a layer's seven linear layers."""


@pytest.fixture(scope="module")
def adapted_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    with open_faulty_run(task, tmp_path_factory.mktemp("adapted"), *ADAPTERS) as run:
        yield run


@pytest.fixture
def stepped_run(adapted_run: RealRun) -> Iterator[RealRun]:
    """The run after an update that is not published yet; healed afterwards."""
    adapted_run.publisher.publish(adapted_run.state.step, StepRecord())
    move_weights(adapted_run, 0.02)
    yield adapted_run
    plant(adapted_run, None)


def published(run: RealRun) -> dict[str, float]:
    record = StepRecord()
    run.publisher.publish(run.state.step, record, canary="always")
    return record.metrics()


def test_a_step_sends_the_adapters_alone_and_its_gaps_are_of_rounding(stepped_run: RealRun) -> None:
    metrics = real_step(stepped_run)
    assert metrics["sync/canary_mean_gap"] < 1e-5
    assert metrics["sync/rollout_gap_max"] < 1e-4
    assert metrics["sync/bytes"] == LAYERS * 3 * SUMS * 4


@pytest.mark.slow
def test_an_engine_in_the_place_of_a_lost_one_gets_weights_and_adapters(adapted_run: RealRun) -> None:
    published(adapted_run)
    adapters = published(adapted_run)["sync/bytes"]
    move_weights(adapted_run, 0.02)
    old = identity_of(adapted_run.services.engines._engines[0]).pid
    os.kill(old, signal.SIGKILL)
    metrics = published(adapted_run)
    assert identity_of(adapted_run.services.engines._engines[0]).pid != old
    assert metrics["recovery/engines_replaced"] == 1
    whole = adapted_run.services.actor.manifest(all_tensors=True)
    assert metrics["sync/bytes"] == sum(4 * prod(spec.shape) for spec in whole.tensors) > 4 * adapters
    assert metrics["sync/canary_mean_gap"] < 1e-5
    assert published(adapted_run)["sync/bytes"] == adapters


@pytest.mark.parametrize("fault", ["stale_adapter", "no_adapter"])
@pytest.mark.parametrize("has_canary", [True, False])
def test_an_engine_that_computes_with_another_adapter_is_found(
    stepped_run: RealRun, fault: str, has_canary: bool
) -> None:
    plant(stepped_run, fault)
    where = "canary tokens of rollout engine 0" if has_canary else "this step's rollouts"
    with pytest.raises(SyncProofError, match=where):
        real_step(stepped_run if has_canary else with_values(stepped_run, NO_CANARY))
