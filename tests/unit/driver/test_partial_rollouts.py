"""Weights that change under running responses, with formulas for processes: versions, books, checkpoints, lost engines."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import NOT_OF_THE_TRAINING
from formula_run import STEPS, WIDTH, World, live, log_probs_of, without_processes

from verl_rc.checkpoint import RunState, SavedRun
from verl_rc.cluster.engine_group import EnginesLostError
from verl_rc.cluster.remote import ProcessLostError
from verl_rc.data.batches import Completions, Timed
from verl_rc.data.parts import Part
from verl_rc.driver import weights
from verl_rc.rollout.sampling import GenerationRequest, part_seed

PACE = 2
"""Tokens of each response that the engine samples between two publications."""


def partial(k: int) -> tuple[str, ...]:
    steps = (f"async_training.staleness_threshold={k}", f"async_training.deterministic_steps={PACE}")
    return ("actor_rollout_ref.hybrid_engine=False", *steps)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_processes(monkeypatch)


class Cutting(World):
    """Its engine cuts what runs at an update. A part depends on its seed, its offset and the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, GenerationRequest] = {}
        self.grown: dict[int, list[Part]] = {}
        """Parts of the samples that were submitted and not taken, as the engine has them."""
        self.told: dict[int, list[Part]] = {}
        """The same, as the driver has been told."""
        self.numbers = 0
        self.waited: list[int] = []
        """Tokens that were still missing when a sample was waited for."""

    def submit(self, requests: Sequence[GenerationRequest], options: Any) -> list[int]:
        numbers = list(range(self.numbers, self.numbers + len(requests)))
        self.numbers += len(requests)
        for number, request in zip(numbers, requests, strict=True):
            self.requests[number] = request
            self.grown[number] = list(request.parts)
            self.told[number] = list(request.parts)
        return numbers

    def missing(self, number: int) -> int:
        return 3 + self.requests[number].seed % (WIDTH - 2) - sum(len(part.token_ids) for part in self.grown[number])

    def grow(self, number: int, count: int) -> None:
        count = min(count, self.missing(number))
        if count == 0:
            return
        offset = sum(len(part.token_ids) for part in self.grown[number])
        seed = part_seed(self.requests[number].seed, offset)
        tokens = torch.tensor([1 + (40503 * seed + 977 >> 3 * place) % 7 for place in range(count)], dtype=torch.int32)
        log_probs = log_probs_of(tokens, self.engine) - 0.02 * (1 + self.engine) * (tokens % 3 - 1)
        self.grown[number].append(Part(tokens, log_probs, self.version))

    def begin_steps(self) -> None:
        for number in self.grown:
            self.grow(number, PACE)

    def wait_for(self, numbers: Sequence[int], on_loss: Any = None) -> None:
        for number in numbers:
            self.waited.append(self.missing(number))
            self.grow(number, WIDTH)

    def collect_parts(self, on_loss: Any = None) -> tuple[list[int], dict[int, Any]]:
        self.told = {number: list(parts) for number, parts in self.grown.items()}
        return [number for number in self.grown if not self.missing(number)], {}

    def parts(self, number: int) -> tuple[list[Part], int]:
        return list(self.told[number]), 0

    def collect(self, wait_seconds: float, on_loss: Any = None) -> list[int]:
        """One more token of each."""
        for number in self.grown:
            self.grow(number, 1)
        return [number for number in self.grown if not self.missing(number)]

    def take(self, numbers: Sequence[int]) -> Completions:
        rows = []
        for number in numbers:
            parts = self.grown.pop(number)
            del self.told[number]
            columns = [
                torch.cat([part.token_ids for part in parts]).long(),
                torch.cat([part.log_probs for part in parts]),
                torch.cat([torch.full((len(part.token_ids),), part.version) for part in parts]),
            ]
            length = len(columns[0])
            tokens, log_probs, versions = (
                torch.nn.functional.pad(column, (0, WIDTH - length), value=value)
                for column, value in zip(columns, (0, 0.0, -1), strict=True)
            )
            facts = {"response_lengths": torch.tensor([length]), "finished": torch.tensor([True]), "batch_size": [1]}
            rows.append(
                Completions(
                    responses=tokens[None], rollout_log_probs=log_probs[None], policy_versions=versions[None], **facts
                )
            )
        return Completions.cat(rows)

    def generate(self, requests: Sequence[GenerationRequest], options: Any, on_loss: Any = None) -> Timed[Completions]:
        return Timed(self.sample(requests), 0.5)

    def deliver(self, version: int) -> tuple[None, None]:
        self.engine, self.version = self.trained, version
        return None, None


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, without times."""
    given = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(NOT_OF_THE_TRAINING)} for line in given
    }


def samples(folder: Path, step: int) -> bytes:
    return (folder / "rollouts" / f"{step}.jsonl").read_bytes()


def run(folder: Path, *overrides: str, world: World | None = None, state: RunState | None = None, **options: Any) -> World:
    folder.mkdir(exist_ok=True)
    checkpoint, dump = options.pop("checkpoint", None), f"trainer.rollout_data_dir={folder / 'rollouts'}"
    return live(folder, state or RunState(), checkpoint, dump, *overrides, world=world or Cutting(), **options)


@pytest.mark.parametrize("k", [1, 2])
def test_responses_have_tokens_of_several_versions_within_the_bound(tmp_path: Path, k: int) -> None:
    world = run(tmp_path, *partial(k), steps=6)
    found = lines(tmp_path)
    later = range(2, 7)
    assert [found[step]["async/group_age/max"] for step in range(1, 7)] == [min(step, k) for step in range(6)]
    assert all(found[step]["fully_async/partial/partial_ratio"] > 0 for step in later)
    spans = [found[step]["training/off_policy/trajectory_spans/max"] for step in range(1, 7)]
    assert spans == [min(step + 1, k + 1) for step in range(6)]
    assert [found[step]["training/off_policy/trajectory_staleness/min"] for step in range(1, 7)] == [0.0] * 6
    assert any(0 < found[step]["async/token_age/mean"] < k for step in later)
    assert not world.grown  # type: ignore[attr-defined]
    assert any(missing > 0 for missing in world.waited)  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [1, 2])
def test_in_the_order_of_completion_the_hard_bound_holds(tmp_path: Path, k: int) -> None:
    """The default: nothing limits engines, and the trainer takes what is ready."""
    world = run(tmp_path, *partial(k)[:2], steps=6)
    found = lines(tmp_path)
    ages = [found[step]["async/group_age/max"] for step in range(1, 7)]
    assert max(ages) <= found[1]["async/group_age/bound"] == k + 1
    assert any(found[step]["fully_async/partial/partial_ratio"] > 0 for step in range(2, 7))
    assert not world.grown  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_continues_cut_responses_as_the_undisturbed_one_does(tmp_path: Path, k: int, step: int) -> None:
    """Decision 6: all parts end at a publication, so the checkpoint of the step holds them exactly."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    expected = run(whole, *partial(k))
    checkpoint = whole / f"global_step_{step}"
    state = SavedRun.load(checkpoint).state
    found = run(again, *partial(k), state=state, checkpoint=checkpoint)
    assert (found.trained, found.updates) == (expected.trained, expected.updates)
    for later in range(step + 1, STEPS + 1):
        assert lines(again)[later] == lines(whole)[later]
        assert samples(again, later) == samples(whole, later)
        states = [SavedRun.load(folder / f"global_step_{later}").state for folder in (whole, again)]
        assert str(states[0]) == str(states[1])
    assert any(part.version < step for request in found.requests.values() for part in request.parts)  # type: ignore[attr-defined]


def test_a_run_that_forgets_the_parts_trains_on_other_samples(tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", *partial(2))
    checkpoint = tmp_path / "whole" / "global_step_2"
    state = SavedRun.load(checkpoint).state
    forgetful = Cutting()
    submit = forgetful.submit
    forgetful.submit = lambda requests, options: submit(  # type: ignore[method-assign]
        [dataclasses.replace(request, parts=()) for request in requests], options
    )
    found = run(tmp_path / "again", *partial(2), state=state, checkpoint=checkpoint, world=forgetful)
    assert found.trained != expected.trained


def test_a_run_of_whole_responses_goes_on_with_what_was_cut(tmp_path: Path) -> None:
    run(tmp_path / "partial", *partial(2))
    checkpoint = tmp_path / "partial" / "global_step_2"
    whole = (*partial(2)[:2], "async_training.partial_rollout=False")
    run(tmp_path / "whole", *whole, state=SavedRun.load(checkpoint).state, checkpoint=checkpoint)
    found = lines(tmp_path / "whole")
    assert found[3]["fully_async/partial/partial_ratio"] > 0
    assert [found[step]["async/group_age/max"] for step in (3, 4)] == [2, 2]


class Losing(Cutting):
    """Its engine is lost at one publication, with all that it sampled since the one before."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def collect_parts(self, on_loss: Any = None) -> tuple[list[int], dict[int, Any]]:
        self.calls += 1
        if self.calls == self.at:
            self.grown = {number: list(parts) for number, parts in self.told.items()}
            on_loss(EnginesLostError({0: ProcessLostError("rollout engine 0 died")}, {}), len(self.grown))
            return [], {}
        return super().collect_parts(on_loss)

    def replace(self, engines: Sequence[int]) -> list[Any]:
        return []

    def open(self) -> None:
        pass


@pytest.mark.parametrize("at", [1, 2, 3])
def test_samples_of_a_lost_engine_continue_from_what_the_driver_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """T7, T8: nothing is lost but tokens since the last publication, and the books balance without these."""
    monkeypatch.setattr(weights, "wait_for_all", lambda pending, timeout: [])
    world = Losing(at)
    run(tmp_path, *partial(2), world=world, steps=6)
    given = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["recovery/engines_replaced"] for line in given) == 1
    assert [line["step"] for line in given] == list(range(7))
    prompts = [json.loads(line)["input"][0]["content"] for step in range(1, 7) for line in samples(tmp_path, step).splitlines()]
    assert prompts == [str(number) for number in range(12) for _ in range(2)]
