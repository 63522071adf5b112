"""kill -9 at ten points of an asynchronous run, of the driver and of an engine: samples that were under way
are resumed with it.

As in test_kill_points.py, one run lives many times, for whole responses and for responses that publications
cut. A lost engine is replaced while the run lives. Run by hand, all in order: ``pytest
tests/chaos/test_kill_points_ahead.py -m chaos -v``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from compared_runs import committed, differences, prompts_in_order
from real_runs import metrics_of, of_folder, train

pytestmark = pytest.mark.chaos

TRAIN, STAGES, WEIGHTS = "verl_rc.trainer.train", "verl_rc.trainer.stages", "verl_rc.trainer.weights"
SUPPLY = "verl_rc.trainer.supply.supply:Supply"
CHECKPOINTS, STORE, RECORD = (
    "verl_rc.trainer.checkpoints",
    "verl_rc.runtime.checkpoint.store",
    "verl_rc.trainer.step_record",
)
STEPS = 6
AHEAD = (
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "async_training.staleness_threshold=2",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.checkpoint.async_save=False",
    "actor_rollout_ref.rollout.max_num_seqs=32",
)
EPISODES = ("actor_rollout_ref.rollout.environment.name=guessing:Guess",)
MODES = {
    "whole": (*AHEAD, "async_training.partial_rollout=False"),
    "cut": (*AHEAD, "async_training.partial_rollout=True", "async_training.deterministic_steps=5"),
    "episodes": (
        *AHEAD,
        "async_training.partial_rollout=True",
        "async_training.deterministic_steps=5",
        *EPISODES,
        "actor_rollout_ref.rollout.environment.arguments={latency: 0.02, max_turns: 4}",
    ),
    "replayed episodes": (
        *AHEAD,
        "async_training.partial_rollout=True",
        "async_training.deterministic_steps=5",
        *EPISODES,
        "actor_rollout_ref.rollout.environment.arguments={latency: 0.02, max_turns: 4, snapshot: False}",
        "actor_rollout_ref.rollout.environment.hosts=2",
    ),
    "experts": (
        *AHEAD,
        "async_training.partial_rollout=True",
        "async_training.deterministic_steps=5",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    ),
    # Needs a CPU with products in float16.
    "float16 and supports": (
        *AHEAD,
        "async_training.partial_rollout=True",
        "async_training.deterministic_steps=5",
        *("actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor_rollout_ref.rollout.dtype=float16"),
        *("actor_rollout_ref.rollout.top_p=0.95", "actor_rollout_ref.rollout.top_k=20"),
    ),
}
KILLS = (  # function, number of the call, when, and the steps that this life commits
    (f"{SUPPLY}.take", 1, "0.02", 0),
    (f"{STAGES}:update_actor", 1, "0.02", 0),
    (f"{CHECKPOINTS}:commit", 1, "before", 0),
    (f"{CHECKPOINTS}:commit", 1, "after", 1),
    (f"{SUPPLY}.admit", 1, "after", 0),
    (f"{SUPPLY}.publish", 2, "0.01", 1),
    (f"{SUPPLY}.close_step", 1, "before", 0),
    (f"{STORE}:CheckpointStore._write_latest", 1, "before", 1),
    (f"{STAGES}:evaluate", 2, "0.02", 1),
    (f"{RECORD}:StepRecord.log", 1, "before", 0),
)
NOTICED_AT_ONCE = ((f"{SUPPLY}.take", 1, "0.02"),)
"""The trainer waits for samples and still holds the weights that the engine had: they are sampled again by
these."""
AT_ANY_TIME = (
    (
        (f"{SUPPLY}.take", 1, "0.02"),
        (f"{STAGES}:evaluate", 2, "before"),
        (f"{SUPPLY}.take", 3, "before"),
        (f"{SUPPLY}.admit", 5, "after"),
        (f"{STAGES}:evaluate", 5, "0.01"),
    ),
    (
        (f"{STAGES}:update_actor", 1, "0.02"),
        (f"{WEIGHTS}:Publisher.publish", 3, "0.005"),
        (f"{SUPPLY}.publish", 3, "before"),
        (f"{TRAIN}:validate", 4, "0.01"),
        (f"{CHECKPOINTS}:write", 5, "before"),
    ),
)
"""The loss may be noticed after an update; what was under way then goes on by the newer weights."""


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.fixture(scope="module")
def of_mode(mode: str, request: pytest.FixtureRequest) -> list[str]:
    starts = {
        "episodes": "game_overrides",
        "replayed episodes": "game_overrides",
        "experts": "expert_overrides",
    }
    return [*request.getfixturevalue(starts.get(mode, "overrides")), *MODES[mode]]


@pytest.fixture(scope="module")
def whole(mode: str, of_mode: list[str], folder: Path) -> Path:
    """The run that nothing disturbs."""
    result = train([*of_mode, *of_folder(folder / f"{mode}_whole")])
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / f"{mode}_whole"


@pytest.mark.parametrize(("function", "call", "when", "gain"), KILLS)
def test_the_driver_is_killed(
    mode: str, of_mode: list[str], whole: Path, folder: Path, function: str, call: int, when: str, gain: int
) -> None:
    lives = folder / f"{mode}_lives"
    done = len(committed(lives)) + gain
    result = train([*of_mode, *of_folder(lives)], "driver", "SIGKILL", function, str(call), when)
    assert "disturbance: SIGKILL to the driver" in result.stderr, result.stderr[-3000:]
    assert result.returncode == -9, result.stderr[-3000:]
    assert committed(lives) == list(range(1, done + 1))
    assert differences(whole, lives, done) == []


def test_the_last_life_ends_as_the_run_that_never_died(
    mode: str, of_mode: list[str], whole: Path, folder: Path
) -> None:
    result = train([*of_mode, *of_folder(folder / f"{mode}_lives")])
    assert result.returncode == 0, result.stderr[-3000:]
    assert differences(whole, folder / f"{mode}_lives", STEPS) == []
    prompts = prompts_in_order(folder / f"{mode}_lives", STEPS)
    assert prompts == prompts_in_order(whole, STEPS)
    assert len(set(prompts)) == len(prompts) == 4 * STEPS


def test_an_engine_lost_while_the_trainer_waits_changes_nothing(
    mode: str, of_mode: list[str], whole: Path, folder: Path
) -> None:
    there = folder / f"{mode}_engines"
    lose_engines([*of_mode, *of_folder(there)], NOTICED_AT_ONCE)
    assert differences(whole, there, STEPS) == []


@pytest.mark.parametrize("losses", AT_ANY_TIME, ids=["before_updates", "after_updates"])
def test_an_engine_lost_at_any_time_costs_no_sample(
    mode: str,
    of_mode: list[str],
    folder: Path,
    losses: tuple[tuple[str, int, str], ...],
    request: pytest.FixtureRequest,
) -> None:
    there = folder / f"{mode}_{request.node.callspec.id}"
    lose_engines([*of_mode, *of_folder(there)], losses)
    assert len(set(prompts_in_order(there, STEPS))) == 4 * STEPS
    metrics = metrics_of(there)
    assert sum(metrics[step]["recovery/engines_replaced"] for step in range(1, STEPS + 1)) >= len(losses) - 1
    ages = [
        metrics[step]["training/off_policy/trajectory_staleness_worst/min"] for step in range(1, STEPS + 1)
    ]
    assert min(ages) >= 0, "tokens of a version that was not published"


def lose_engines(overrides: list[str], losses: tuple[tuple[str, int, str], ...]) -> None:
    words = [
        word for function, call, when in losses for word in ("engine", "SIGKILL", function, str(call), when)
    ]
    result = train([*overrides, "trainer.hang_timeout_seconds=60"], *words)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("disturbance: ") == len(losses)
