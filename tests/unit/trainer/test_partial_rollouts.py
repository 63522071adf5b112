"""Weights that change under running responses, with formulas for processes: versions, books, checkpoints,
lost engines."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from compared_runs import assert_same_from, lines, samples
from formula_run import STEPS, WIDTH, World, live, log_probs_of, prompt_stream

from verl_rc.config.errors import ConfigError
from verl_rc.records.groups import unpack
from verl_rc.records.parts import Part, Sample
from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.sampling import GenerationRequest, part_seed
from verl_rc.trainer.cluster.engine_group import EnginesLostError
from verl_rc.trainer.cluster.engine_work import AssignedRequest

PACE = 2
"""Tokens of each response that the engine samples between two publications."""


def partial(k: int) -> tuple[str, ...]:
    steps = (f"async_training.staleness_threshold={k}", f"async_training.deterministic_steps={PACE}")
    return ("actor_rollout_ref.hybrid_engine=False", *steps)


pytestmark = pytest.mark.usefixtures("no_processes")


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
        self.versions: set[int] = set()
        """That sampled anything."""
        self.waited: list[int] = []
        """Tokens that were still missing when a sample was waited for."""

    def submit(
        self, requests: Sequence[GenerationRequest], options: Any, *, owners: Sequence[Any], **_: Any
    ) -> list[int]:
        numbers = list(range(self.numbers, self.numbers + len(requests)))
        self.numbers += len(requests)
        for number, request in zip(numbers, requests, strict=True):
            self.requests[number] = request
            self.grown[number] = list(request.so_far.parts)
            self.told[number] = list(request.so_far.parts)
        self.note(numbers, requests, owners)
        return numbers

    def submitted(self) -> list[AssignedRequest]:
        """With their parts, as the driver has been told."""
        for number, parts in self.told.items():
            known = SimpleNamespace(so_far=Sample(number, parts))
            self.handles[number].queued = cast(Request, SimpleNamespace(number=number, request=known))
        return [self.handles[number] for number in self.grown]

    def missing(self, number: int) -> int:
        return (
            3
            + self.requests[number].seed % (WIDTH - 2)
            - sum(len(part.token_ids) for part in self.grown[number])
        )

    def grow(self, number: int, count: int) -> None:
        count = min(count, self.missing(number))
        if count == 0:
            return
        offset = sum(len(part.token_ids) for part in self.grown[number])
        seed = part_seed(self.requests[number].seed, offset)
        tokens = torch.tensor(
            [1 + (40503 * seed + 977 >> 3 * place) % 7 for place in range(count)], dtype=torch.int32
        )
        log_probs = log_probs_of(tokens, self.engine) - 0.02 * (1 + self.engine) * (tokens % 3 - 1)
        self.grown[number].append(Part(tokens, log_probs, self.version))
        self.versions.add(self.version)

    def begin_steps(self) -> None:
        for number in self.grown:
            self.grow(number, PACE)

    def wait_for(self, requests: Sequence[AssignedRequest], replace_lost: Any = None) -> float:
        for request in requests:
            self.waited.append(self.missing(request.number))
            self.grow(request.number, WIDTH)
        self.hand_over([request.number for request in requests])
        return 0.5

    def collect_parts(self, replace_lost: Any = None) -> tuple[list[AssignedRequest], dict[int, Any]]:
        self.told = {number: list(parts) for number, parts in self.grown.items()}
        return self.hand_over([number for number in self.grown if not self.missing(number)]), {}

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        """One more token of each."""
        for number in self.grown:
            self.grow(number, 1)
        return [number for number in self.grown if not self.missing(number)]

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        for number in numbers:
            del self.told[number]
        return [Sample(number, self.grown.pop(number), finished=True) for number in numbers]

    def generate(
        self, requests: Sequence[GenerationRequest], options: Any, replace_lost: Any = None
    ) -> list[Sample]:
        return self.sample(requests)

    def deliver(self, version: int) -> tuple[None, None]:
        self.engine, self.version = self.trained, version
        return None, None


def run(
    folder: Path, *overrides: str, world: World | None = None, state: RunState | None = None, **options: Any
) -> World:
    folder.mkdir(exist_ok=True)
    checkpoint, dump = options.pop("checkpoint", None), f"trainer.rollout_data_dir={folder / 'rollouts'}"
    return live(
        folder, state or RunState(), checkpoint, dump, *overrides, world=world or Cutting(), **options
    )


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


@pytest.mark.parametrize("cache", ["recompute", "keep"])
@pytest.mark.parametrize("k", [1, 2])
def test_in_the_order_of_completion_the_hard_bound_holds(tmp_path: Path, k: int, cache: str) -> None:
    """The default: nothing limits engines, and the trainer takes what is ready; what becomes of caches is the
    engines' matter."""
    world = run(tmp_path, *partial(k)[:2], steps=6, kv_cache_on_update=cache)
    found = lines(tmp_path)
    ages = [found[step]["async/group_age/max"] for step in range(1, 7)]
    assert max(ages) <= found[1]["async/group_age/bound"] == k + 1
    assert any(found[step]["fully_async/partial/partial_ratio"] > 0 for step in range(2, 7))
    assert not world.grown  # type: ignore[attr-defined]


@pytest.mark.parametrize(("deterministic", "bound"), [(True, 3), (False, 5)])
def test_several_steps_have_one_publication_and_the_bound_in_steps(
    tmp_path: Path, deterministic: bool, bound: int
) -> None:
    """⌈2 (1 + 1)⌉ - 1 steps in the order of admission, ⌈2 (1 + 2)⌉ - 1 by completion; only what is published
    samples anything."""
    world = run(tmp_path, *partial(1)[: 3 if deterministic else 2], steps=8, trigger_parameter_sync_step=2)
    found = lines(tmp_path)
    ages = [found[step]["async/group_age/max"] for step in range(1, 9)]
    assert max(ages) <= found[1]["async/group_age/bound"] == bound
    assert max(ages) == bound or not deterministic  # by completion only an unlucky order reaches it
    assert any(found[step]["fully_async/partial/partial_ratio"] > 0 for step in range(3, 9))
    versions = {part.version for request in world.requests.values() for part in request.so_far.parts}  # type: ignore[attr-defined]
    assert versions | world.versions <= {0, 2, 4, 6}  # type: ignore[attr-defined]
    assert len(world.versions) > 2  # type: ignore[attr-defined]
    trained = [row["input"][0]["content"] for step in range(1, 9) for row in samples(tmp_path, step)]
    assert sorted(trained) == sorted(str(number % 12) for number in range(16) for _ in range(2))
    assert not world.grown  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_of_several_steps_per_publication_continues_cut_responses(tmp_path: Path, step: int) -> None:
    mode: dict[str, Any] = {"trigger_parameter_sync_step": 2, "steps": 7}
    whole, again = tmp_path / "whole", tmp_path / "again"
    expected = run(whole, *partial(1), **mode)
    checkpoint = whole / f"global_step_{step}"
    found = run(again, *partial(1), state=SavedRun.load(checkpoint).state, checkpoint=checkpoint, **mode)
    assert (found.trained, found.updates) == (expected.trained, expected.updates)
    for later in range(step + 1, 8):
        assert lines(again)[later] == lines(whole)[later]
        assert samples(again, later) == samples(whole, later)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_continues_cut_responses_as_the_undisturbed_one_does(
    tmp_path: Path, k: int, step: int
) -> None:
    """Decision 6: all parts end at a publication, so the checkpoint of the step holds them exactly."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    expected = run(whole, *partial(k))
    checkpoint = whole / f"global_step_{step}"
    state = SavedRun.load(checkpoint).state
    found = run(again, *partial(k), state=state, checkpoint=checkpoint)
    assert (found.trained, found.updates) == (expected.trained, expected.updates)
    assert_same_from(step, STEPS, whole, again)
    assert any(part.version < step for request in found.requests.values() for part in request.so_far.parts)  # type: ignore[attr-defined]


def test_a_run_that_forgets_the_parts_trains_on_other_samples(tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", *partial(2))
    checkpoint = tmp_path / "whole" / "global_step_2"
    state = SavedRun.load(checkpoint).state
    forgetful = Cutting()
    submit = forgetful.submit
    forgetful.submit = lambda requests, options, **more: submit(  # type: ignore[method-assign]
        [dataclasses.replace(request, so_far=Sample(0)) for request in requests], options, **more
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


def test_another_number_of_samples_than_was_sampled_ahead_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    run(tmp_path / "whole", *partial(2))
    checkpoint = tmp_path / "whole" / "global_step_2"
    with pytest.raises(ConfigError, match=r"must have the 3 samples .* was sampled ahead with 2: remax"):
        run(
            tmp_path / "again",
            *partial(2),
            "algorithm.adv_estimator=remax",
            state=SavedRun.load(checkpoint).state,
            checkpoint=checkpoint,
        )


def test_a_limit_that_a_running_response_has_reached_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    run(tmp_path / "whole", *partial(2))
    checkpoint = tmp_path / "whole" / "global_step_2"
    state = SavedRun.load(checkpoint).state
    saved = SavedRun.load(checkpoint).state.supply
    assert saved is not None
    groups = unpack(saved.groups(), prompt_stream().row)
    running = [sample for group in groups for sample in group.samples]
    longest = max(sample.num_sampled for sample in running if not sample.ended)
    assert longest > 1

    def resumed(limit: int) -> None:
        run(
            tmp_path / f"again_{limit}",
            *partial(2),
            f"data.max_response_length={limit}",
            state=state,
            checkpoint=checkpoint,
        )

    with pytest.raises(
        ConfigError,
        match=rf"at least {longest + 1} to resume here: .* of {longest} tokens .* got {longest}\.",
    ):
        resumed(longest)
    resumed(longest + 1)


class Losing(Cutting):
    """Its engine is lost at one publication, with all that it sampled since the one before."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def collect_parts(self, replace_lost: Any = None) -> tuple[list[AssignedRequest], dict[int, Any]]:
        self.calls += 1
        if self.calls == self.at:
            self.grown = {number: list(parts) for number, parts in self.told.items()}
            replace_lost(EnginesLostError({0: ProcessLostError("rollout engine 0 died")}, {}))
            return [], {}
        return super().collect_parts(replace_lost)

    def num_held(self, engines: Sequence[int]) -> int:
        return len(self.grown)

    def replace(self, engines: Sequence[int], timeout_seconds: float) -> None:
        pass

    def open(self) -> None:
        pass


@pytest.mark.parametrize("at", [1, 2, 3])
def test_samples_of_a_lost_engine_continue_from_what_the_driver_has(tmp_path: Path, at: int) -> None:
    """T7, T8: nothing is lost but tokens since the last publication, and the books balance without these."""
    world = Losing(at)
    run(tmp_path, *partial(2), world=world, steps=6)
    given = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["recovery/engines_replaced"] for line in given) == 1
    assert [line["step"] for line in given] == list(range(7))
    prompts = [row["input"][0]["content"] for step in range(1, 7) for row in samples(tmp_path, step)]
    assert prompts == [str(number) for number in range(12) for _ in range(2)]


class Unequal(Losing):
    """Two engines, which share samples by their numbers: the second has half the pace, and is lost at one
    publication."""

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        for number in self.grown:
            self.grow(number, 2 - number % 2)
        return [number for number in self.grown if not self.missing(number)]

    def collect_parts(self, replace_lost: Any = None) -> tuple[list[AssignedRequest], dict[int, Any]]:
        self.calls += 1
        if self.calls == self.at:
            lost = {number: list(parts) for number, parts in self.told.items() if number % 2}
            self.grown |= lost
            replace_lost(EnginesLostError({1: ProcessLostError("rollout engine 1 died")}, {}))
        return Cutting.collect_parts(self, replace_lost)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("at", [0, 2])
def test_two_engines_of_which_one_is_slow_and_is_lost(tmp_path: Path, every: int, at: int) -> None:
    """A group has samples of both. It waits for the slow one; every prompt is trained on once and within the
    bound."""
    world = Unequal(at)
    run(tmp_path, *partial(1)[:2], world=world, steps=8, trigger_parameter_sync_step=every)
    found = lines(tmp_path)
    bound = 2 * every + every - 1
    ages = [found[step]["async/group_age/max"] for step in range(1, 9)]
    assert max(ages) <= found[1]["async/group_age/bound"] == bound
    trained = [row["input"][0]["content"] for step in range(1, 9) for row in samples(tmp_path, step)]
    assert sorted(trained) == sorted(str(number % 12) for number in range(16) for _ in range(2))
    assert any(found[step]["fully_async/partial/partial_ratio"] > 0 for step in range(2, 9))
    given = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["recovery/engines_replaced"] for line in given) == (at > 0)
    assert not world.grown
