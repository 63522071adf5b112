"""Whole responses that go on while the trainer does: an engine loads staged weights when it has ended what it
had."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compared_runs import NOT_OF_THE_TRAINING
from formula_run import World, live

from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.trainer.cluster.engine_group import EnginesLostError

STAGED = "actor_rollout_ref.rollout.checkpoint_engine.stage_updates=True"
CANARIES = "actor_rollout_ref.rollout.sync_proof.canary_freq"
AHEAD = (
    "actor_rollout_ref.hybrid_engine=False",
    "async_training.partial_rollout=False",
    "async_training.staleness_threshold=2",
)
STEPS = 6


pytestmark = pytest.mark.usefixtures("no_processes")


class OneAtATime(World):
    """One sample ends with every look, the oldest first. Staged weights are loaded when those before them
    have ended."""

    def __init__(self, lost_at: int = -1) -> None:
        super().__init__()
        self.ended: set[int] = set()
        self.older: set[int] | None = None
        """What has to end before staged weights are loaded; None: nothing is staged."""
        self.staged_value = 0.0
        self.versions: list[tuple[int, int]] = []
        """At every update: steps done, and the version that the engine held then."""
        self.lost_at = lost_at
        """The publication, from 1, in which the engine is lost; -1: none."""
        self.proofs: list[int] = []

    def submit(self, requests: Sequence[GenerationRequest], options: Any, **_: Any) -> list[int]:
        """What comes behind staged weights is sampled by them."""
        held = self.engine, self.version
        if self.older is not None:
            self.engine, self.version = self.staged_value, self.staged.version
        numbers = super().submit(requests, options, **_)
        self.engine, self.version = held
        return numbers

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        self.ended |= set(sorted(self.under_way - self.ended)[:1])
        if self.older is not None and not self.older - self.ended:
            self.engine, self.version, self.older = self.staged_value, self.staged.version, None
        return sorted(self.ended & self.under_way)

    def stage(self, version: int) -> None:
        assert self.older is None, "the engine has not loaded what was staged before"
        if self.lost_at == version:
            self.lost_at = 0
            raise EnginesLostError({0: ProcessLostError("rollout engine 0 died")}, {})
        self.staged = SimpleNamespace(version=version, send_receipt=None)
        self.staged_value, self.older = self.trained, self.under_way - self.ended
        self.look(0.0)

    def loaded(self) -> list[Any] | None:
        if self.older is None:
            self.proofs.append(self.staged.version)
        return [] if self.older is None else None

    def deliver(self, version: int) -> tuple[None, None]:
        self.staged, self.older = None, None
        held = self.under_way
        if self.lost_at == 0:  # what is under way is sampled again
            self.lost_at, self.under_way = -1, set()
        result = super().deliver(version)
        self.under_way = held
        return result

    def update(self, batch: Any, *arguments: Any) -> Any:
        self.versions.append((self.updates, self.version))
        return super().update(batch, *arguments)


def run(
    folder: Path, *overrides: str, world: World, state: RunState | None = None, checkpoint: Path | None = None
) -> None:
    folder.mkdir(exist_ok=True)
    dump = f"trainer.rollout_data_dir={folder / 'rollouts'}"
    live(folder, state or RunState(), checkpoint, dump, *AHEAD, *overrides, world=world, steps=STEPS)


def left_by(folder: Path, steps: Sequence[int]) -> list[Any]:
    """Samples and metrics, but for what depends on when something ended."""
    lines = {
        line["step"]: line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    }
    other = (*NOT_OF_THE_TRAINING, "async/length_ratio")
    kept = [
        {name: value for name, value in lines[step].items() if not name.startswith(other)} for step in steps
    ]
    return [*kept, *((folder / "rollouts" / f"{step}.jsonl").read_text() for step in steps)]


ALL = range(1, STEPS + 1)


def test_the_trainer_goes_on_and_nothing_else_changes(tmp_path: Path) -> None:
    """§5.3: a response has the version of its admission at any speed. The next publication waits for the last
    one."""
    whole, staged = OneAtATime(), OneAtATime()
    run(tmp_path / "whole", "trainer.save_freq=-1", f"{CANARIES}=0", world=whole)
    run(tmp_path / "staged", "trainer.save_freq=-1", f"{CANARIES}=0", STAGED, world=staged)
    assert (staged.trained, staged.updates) == (whole.trained, whole.updates)
    assert left_by(tmp_path / "staged", ALL) == left_by(tmp_path / "whole", ALL)
    assert [version for _, version in whole.versions] == [0, 1, 2, 3, 4, 5]
    behind = [step - version for step, version in staged.versions]
    assert max(behind) == 1, "the trainer did not go on while the engine held older weights"
    assert staged.proofs == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [2, 4])
def test_a_checkpoint_holds_nothing_that_has_begun(tmp_path: Path, step: int) -> None:
    run(tmp_path / "whole", "trainer.save_freq=2", f"{CANARIES}=0", STAGED, world=OneAtATime())
    checkpoint, world = tmp_path / "whole" / f"global_step_{step}", OneAtATime()
    state = SavedRun.load(checkpoint).state
    run(
        tmp_path / "again",
        "trainer.save_freq=2",
        STAGED,
        f"{CANARIES}=0",
        world=world,
        state=state,
        checkpoint=checkpoint,
    )
    later = range(step + 1, STEPS + 1)
    assert left_by(tmp_path / "again", later) == left_by(tmp_path / "whole", later)


def test_a_publication_that_canaries_prove_is_waited_for(tmp_path: Path) -> None:
    world = OneAtATime()
    run(tmp_path, "trainer.save_freq=-1", f"{CANARIES}=2", STAGED, world=world)
    assert world.proofs == [1, 3, 5]
    assert dict(world.versions) | {2: 2, 4: 4} == dict(world.versions)


@pytest.mark.parametrize("publication", [1, 3])
def test_a_loss_while_weights_are_staged_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publication: int
) -> None:
    replaced: list[Any] = []
    monkeypatch.setattr(
        "verl_rc.trainer.weights.Publisher._replace_engines", lambda self, lost, record: replaced.append(lost)
    )
    monkeypatch.setattr("verl_rc.trainer.weights.Publisher._check_canary", lambda *_: None)
    world = OneAtATime(lost_at=publication)
    run(tmp_path, "trainer.save_freq=-1", f"{CANARIES}=0", STAGED, world=world)
    assert len(replaced) == 1
    assert publication not in world.proofs
    prompts = [
        line
        for step in ALL
        for line in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()[::2]
    ]
    assert [json.loads(line)["input"][0]["content"] for line in prompts] == [
        str(row % 12) for row in range(2 * STEPS)
    ]
