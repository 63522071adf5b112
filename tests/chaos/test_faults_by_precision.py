"""Which planted faults are found with which engine, after a step at a usual learning rate
(docs/troubleshooting.md)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_steps import RealRun, move_weights, open_faulty_run, plant, real_step, with_values

from verl_rc.runtime.weight_sync.proof import SyncProofError
from verl_rc.trainer.step_record import StepRecord

pytestmark = pytest.mark.chaos

LEARNING_RATE = 5e-5
ENGINES = {
    "float32": [],
    "bfloat16": ["actor_rollout_ref.rollout.dtype=bfloat16"],
    "fp8": [
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.quantization=fp8_per_channel",
    ],
}
ALWAYS_FOUND = {
    "one_tensor_not_sent",
    "older_version",
    "nan_log_prob",
    "missing_log_prob",
    "nan_log_probs",
    "shifted_log_probs",
}
BY_THE_GAP = ("skipped_sync", "half_loaded_tensor", "stale_prefix_cache", "other_temperature")
FOUND = {
    "float32": {*ALWAYS_FOUND, *BY_THE_GAP},
    "bfloat16": {*ALWAYS_FOUND, "other_temperature"},
    "fp8": ALWAYS_FOUND,
}


@pytest.fixture(scope="module", params=ENGINES)
def calibrated_run(
    request: pytest.FixtureRequest, task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, RealRun]]:
    """One healthy step of a run at the learning rate sets the limits of the gaps."""
    folder = tmp_path_factory.mktemp(request.param)
    rate = f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}"
    with open_faulty_run(task, folder, *ENGINES[request.param], rate, "trainer.test_freq=-1") as run:
        real_step(run)
        yield request.param, run


@pytest.mark.parametrize("fault", sorted(ALWAYS_FOUND | set(BY_THE_GAP)))
def test_what_finds_a_fault_depends_on_the_engines_precision(
    calibrated_run: tuple[str, RealRun], fault: str
) -> None:
    engine, run = calibrated_run
    run.publisher.publish(run.state.step, StepRecord())
    move_weights(run, LEARNING_RATE)
    plant(run, fault)
    values = {"trainer.alerts.mismatch_limit": None}
    try:
        metrics = real_step(with_values(run, values))
        found = f"not found: gap {metrics['sync/rollout_gap_mean']:.2g}"
        if metrics["alerts/gap"]:
            found = f"found by an alert: gap {metrics['sync/rollout_gap_mean']:.2g}"
    except (SyncProofError, RuntimeError, ValueError) as error:
        found = f"found: {str(error).partition('.')[0]}"
    finally:
        plant(run, None)
    print(
        f"{engine} | {fault} | {found} | limits {run.state.rollout_gap_limit}, {run.state.canary_gap_limit}"
    )
    assert found.startswith("found") == (fault in FOUND[engine])
