"""kill -9 at points spread over driver, trainer rank and engine, over a step and over a save: what is resumed
equals what never died, to the last bit.

One run lives many times: each life goes on from the newest checkpoint and ends at the next point. Run by
hand, all in order: ``pytest tests/chaos/test_kill_points.py -m chaos -v``.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from compared_runs import committed, differences, prompts_in_order
from real_runs import of_folder, train

pytestmark = pytest.mark.chaos

TRAIN, STAGES, WEIGHTS = "verl_rc.trainer.train", "verl_rc.trainer.stages", "verl_rc.trainer.weights"
DECIDE, SUPPLY = "verl_rc.trainer.supply.scored_groups", "verl_rc.trainer.supply.supply"
CHECKPOINTS, STORE = "verl_rc.trainer.checkpoints", "verl_rc.runtime.checkpoint.store"
RECORD, STATE = "verl_rc.trainer.step_record", "verl_rc.runtime.checkpoint.run_state"


@dataclass(frozen=True)
class Life:
    """One process start, and where it ends."""

    victim: str
    function: str
    call: int
    when: str
    gain: int
    """Steps that it commits."""

    def __str__(self) -> str:
        return f"{self.victim}-{self.function.rpartition('.')[2]}-{self.call}-{self.when}"


LIVES = (
    Life("driver", f"{SUPPLY}:Supply.take", 1, "0.02", 0),
    Life("actor", f"{STAGES}:update_actor", 2, "0.05", 1),
    Life("driver", f"{CHECKPOINTS}:write", 1, "0.02", 0),
    Life("actor", f"{CHECKPOINTS}:write", 1, "0.02", 0),
    Life("driver", f"{STORE}:sync_tree", 1, "after", 0),
    Life("driver", f"{STORE}:CheckpointStore._write_latest", 1, "before", 1),
    Life("actor", f"{WEIGHTS}:Publisher.publish", 2, "0.005", 0),
    Life("driver", f"{STAGES}:update_actor", 1, "0.05", 0),
    Life("driver", f"{CHECKPOINTS}:commit", 1, "before", 0),
    Life("driver", f"{TRAIN}:validate", 2, "0.02", 1),
    Life("actor", f"{STAGES}:evaluate", 1, "0.02", 0),
    Life("driver", f"{STATE}:SavedRun.save", 1, "before", 0),
    Life("driver", f"{WEIGHTS}:Publisher.publish", 2, "0.01", 0),
    Life("driver", f"{CHECKPOINTS}:commit", 1, "after", 1),
    Life("driver", f"{RECORD}:StepRecord.log", 1, "before", 0),
    Life("driver", f"{DECIDE}:score", 1, "before", 0),
    Life("actor", f"{SUPPLY}:Supply.take", 1, "before", 0),
    Life("driver", f"{CHECKPOINTS}:check_settings", 1, "after", 0),
    Life("driver", f"{STAGES}:correct", 1, "after", 0),
    Life("driver", f"{STORE}:CheckpointStore.begin", 1, "after", 0),
)
LIVES_WITH_ASYNC_SAVE = (
    Life("actor", f"{CHECKPOINTS}:write", 1, "after", 0),
    Life("driver", f"{CHECKPOINTS}:commit", 1, "after", 0),
    Life("driver", f"{SUPPLY}:Supply.take", 2, "0.02", 0),
    Life("actor", f"{SUPPLY}:Supply.take", 2, "0.05", 0),
    Life("actor", f"{STAGES}:evaluate", 2, "before", 0),
    Life("driver", f"{CHECKPOINTS}:commit", 2, "before", 1),
    Life("driver", f"{STORE}:CheckpointStore.seal", 1, "after", 0),
    Life("driver", f"{STORE}:CheckpointStore.commit", 1, "before", 1),
    Life("driver", f"{STORE}:sync_tree", 1, "after", 1),
)
"""The actor takes six seconds to write, longer than a step: where nothing is gained it was in the middle of
it."""
ENGINE_LOSSES = (
    ("SIGSTOP", f"{SUPPLY}:Supply.take", "1", "0.02"),
    ("SIGKILL", f"{WEIGHTS}:Publisher.publish", "2", "0.005"),
    ("SIGSTOP", f"{WEIGHTS}:Publisher.publish", "3", "before"),
    ("SIGKILL", f"{TRAIN}:validate", "3", "0.02"),
    ("SIGKILL", f"{STAGES}:update_actor", "4", "0.05"),
    ("SIGKILL", f"{CHECKPOINTS}:write", "5", "before"),
)


@pytest.mark.parametrize("life", LIVES, ids=str)
def test_a_life_that_ends_leaves_only_what_never_died_would_have(
    life: Life, overrides: list[str], folder: Path, whole_run: Path
) -> None:
    live(life, overrides, folder / "lives", whole_run)


def test_the_last_life_ends_as_the_run_that_never_died(
    overrides: list[str], folder: Path, whole_run: Path
) -> None:
    live_to_the_end(overrides, folder / "lives", whole_run)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOR_WORKER", "slow_disk:SlowlySavingPolicyWorker")


ASYNC_SAVE = "actor_rollout_ref.actor.checkpoint.async_save=True"


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("life", LIVES_WITH_ASYNC_SAVE, ids=str)
def test_a_life_that_saves_beside_its_steps(
    life: Life, overrides: list[str], folder: Path, whole_run: Path
) -> None:
    live(life, [*overrides, ASYNC_SAVE], folder / "async", whole_run)


@pytest.mark.usefixtures("slow_disk")
def test_the_last_life_that_saves_beside_its_steps(
    overrides: list[str], folder: Path, whole_run: Path
) -> None:
    live_to_the_end([*overrides, ASYNC_SAVE], folder / "async", whole_run)


def live(life: Life, overrides: list[str], lives: Path, whole_run: Path) -> None:
    done = len(committed(lives)) + life.gain
    result = train(
        [*overrides, *of_folder(lives)], life.victim, "SIGKILL", life.function, str(life.call), life.when
    )
    assert f"disturbance: SIGKILL to the {life.victim}" in result.stderr
    if life.victim == "driver":
        assert result.returncode == -9, result.stderr[-3000:]
    else:
        assert result.returncode == 1, result.stderr[-3000:]
        assert "actor rank 0 died while it was to" in result.stderr.strip().rpartition("Error: ")[2], (
            result.stderr[-3000:]
        )
    assert committed(lives) == list(range(1, done + 1))
    assert differences(whole_run, lives, done) == []


def live_to_the_end(overrides: list[str], lives: Path, whole_run: Path) -> None:
    result = train([*overrides, *of_folder(lives)])
    assert result.returncode == 0, result.stderr[-3000:]
    steps = committed(whole_run)[-1]
    assert differences(whole_run, lives, steps) == []
    prompts = prompts_in_order(lives, steps)
    assert prompts == prompts_in_order(whole_run, steps)
    assert len(set(prompts)) == len(prompts) == 4 * steps


def test_engines_that_are_lost_change_nothing(overrides: list[str], folder: Path, whole_run: Path) -> None:
    words = [word for loss in ENGINE_LOSSES for word in ("engine", *loss)]
    result = train(
        [*overrides, *of_folder(folder / "engines"), "trainer.hang_timeout_seconds=20"],
        *words,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("disturbance: ") == len(ENGINE_LOSSES)
    assert differences(whole_run, folder / "engines", committed(whole_run)[-1]) == []
