"""Sampling ahead, with formulas for processes: ages, order, versions and resumed runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import assert_same_from, lines, samples
from formula_run import OVERRIDES, STEPS, Scorer, World, live, log_probs_of
from small_models import small_run_config

from verl_rc.algorithm.rewards import RewardOutput
from verl_rc.algorithm.supply.group_book import AdmissionRule, GroupBook
from verl_rc.config.errors import ConfigError
from verl_rc.records.dataset import PromptRow
from verl_rc.records.parts import Part, Sample
from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.runtime.weight_sync.proof import SyncProofError
from verl_rc.trainer import checkpoints
from verl_rc.trainer.cluster.engine_group import EnginesLostError
from verl_rc.trainer.supply import supply_progress
from verl_rc.trainer.supply.supply_progress import SupplyProgress

CANARIES = "actor_rollout_ref.rollout.sync_proof.canary_freq"
OWN_DEVICES = ("actor_rollout_ref.hybrid_engine=False", "async_training.partial_rollout=False")


def ahead(k: int) -> tuple[str, ...]:
    return (*OWN_DEVICES, f"async_training.staleness_threshold={k}")


pytestmark = pytest.mark.usefixtures("no_processes")


class ReadWorld(World):
    """Notes by which version and in which order prompts were sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, list[int]]] = []

    def submit(self, requests: Sequence[GenerationRequest], options: Any, **_: Any) -> list[int]:
        self.asked.append((self.version, [request.seed for request in requests]))
        return super().submit(requests, options, **_)


def run(
    folder: Path, *overrides: str, world: World | None = None, state: RunState | None = None, **options: Any
) -> World:
    folder.mkdir(exist_ok=True)
    dump = f"trainer.rollout_data_dir={folder / 'rollouts'}"
    return live(folder, state or RunState(), None, dump, *overrides, world=world, **options)


def resume(whole: Path, folder: Path, step: int, *overrides: str) -> World:
    checkpoint = whole / f"global_step_{step}"
    state = SavedRun.load(checkpoint).state
    folder.mkdir(exist_ok=True)
    return live(folder, state, checkpoint, f"trainer.rollout_data_dir={folder / 'rollouts'}", *overrides)


@pytest.mark.parametrize("k", [1, 2])
def test_ages_reach_the_bound_and_never_pass_it(tmp_path: Path, k: int) -> None:
    world = ReadWorld()
    run(tmp_path / "sync")
    run(tmp_path / "ahead", *ahead(k), world=world)
    found = lines(tmp_path / "ahead")
    ages = [found[step]["async/group_age/max"] for step in range(1, STEPS + 1)]
    assert ages == [min(step, k) for step in range(STEPS)]
    assert ages == [found[step]["async/token_age/mean"] for step in range(1, STEPS + 1)]
    assert {found[step]["async/group_age/bound"] for step in range(1, STEPS + 1)} == {k}
    assert [version for version, _ in world.asked] == list(range(STEPS - k))
    assert len(world.asked[0][1]) == (1 + k) * 2 * 2  # k + 1 steps of two prompts with two samples
    for step in range(1, STEPS + 1):
        prompts = [[row["input"] for row in samples(tmp_path / name, step)] for name in ("sync", "ahead")]
        assert prompts[0] == prompts[1]
    assert samples(tmp_path / "sync", 1) == samples(tmp_path / "ahead", 1)
    assert not world.under_way


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_leaves_what_the_undisturbed_one_leaves(tmp_path: Path, k: int, step: int) -> None:
    """T1 to T3: nothing is lost, sampled twice or admitted too early, wherever the run is killed."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    expected = run(whole, *ahead(k))
    found = resume(whole, again, step, *ahead(k))
    assert (found.trained, found.updates) == (expected.trained, expected.updates)
    assert_same_from(step, STEPS, whole, again)


@pytest.mark.parametrize("k", [0, 2])
def test_a_run_that_rejects_nothing_replaces_nothing(tmp_path: Path, k: int) -> None:
    rule = "algorithm.rollout_correction.rollout_rs"
    given = (
        f"{rule}=seq_mean_k1",
        f"{rule}_threshold=100",
        f"{rule}_target_acceptance=null",
        *(ahead(k) if k else ()),
    )
    run(tmp_path / "never", *given)
    run(tmp_path / "twice", *given, "algorithm.max_refills=2")
    assert lines(tmp_path / "never") == lines(tmp_path / "twice")
    for step in range(1, STEPS + 1):
        assert samples(tmp_path / "never", step) == samples(tmp_path / "twice", step)


def test_a_synchronous_checkpoint_goes_on_ahead(tmp_path: Path) -> None:
    run(tmp_path / "sync")
    resume(tmp_path / "sync", tmp_path / "ahead", 2, *ahead(1))
    found = lines(tmp_path / "ahead")
    assert [found[step]["async/group_age/max"] for step in (3, 4)] == [0, 1]
    assert samples(tmp_path / "ahead", 3) == samples(tmp_path / "sync", 3)


def test_a_smaller_lead_trains_first_what_is_there(tmp_path: Path) -> None:
    run(tmp_path / "whole", *ahead(2), steps=6)
    checkpoint = tmp_path / "whole" / "global_step_2"
    live(tmp_path, SavedRun.load(checkpoint).state, checkpoint, *ahead(1), steps=6)
    found = lines(tmp_path)
    assert [found[step]["async/group_age/max"] for step in (3, 4, 5, 6)] == [2, 2, 2, 1]


def test_a_synchronous_run_does_not_forget_what_was_sampled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, *ahead(1))
    monkeypatch.setattr(checkpoints, "shards_problem", lambda folder: None)
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_2'}")
    assert (
        checkpoints.choose(small_run_config(tmp_path, *OVERRIDES, *named, *ahead(1)), tmp_path)[2].step == 2
    )
    with pytest.raises(ConfigError, match="holds 4 groups that were sampled ahead"):
        checkpoints.choose(small_run_config(tmp_path, *OVERRIDES, *named), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["actor_rollout_ref.rollout.temperature=0.5"],
            r"4 groups that were sampled ahead under other settings: \S+temperature was 1.0, now it is 0.5",
        ),
        (["data.seed=7"], r"must keep the settings .*: data.seed was 1, now it is 7"),
        (["critic.enable=True"], r"global_step_4 holds no critic, and .*adv_estimator=grpo .*needs none"),
    ],
)
def test_a_setting_under_which_the_checkpoint_means_something_else_is_refused(
    changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, *ahead(1), steps=6)
    for step in (5, 6):
        (tmp_path / f"global_step_{step}").rename(tmp_path / f"unused_{step}")
    monkeypatch.setattr(checkpoints, "shards_problem", lambda folder: None)
    with pytest.raises(ConfigError, match=message):
        checkpoints.choose(small_run_config(tmp_path, *OVERRIDES, *ahead(1), *changes), tmp_path)


def test_what_was_measured_under_another_setting_is_forgotten_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "log", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(checkpoints, "shards_problem", lambda folder: None)
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    given = [*OVERRIDES, f"{key}=1.5"]
    before = checkpoints.choose(small_run_config(tmp_path, *OVERRIDES), tmp_path)[2].control
    now = checkpoints.choose(small_run_config(tmp_path, *given), tmp_path)[2].control
    assert before.rejection_threshold is not None
    assert now == replace(before, rejection_threshold=None)
    assert said[2:] == [
        f"control.rejection_threshold as in a new run, because {key} was 1.01, now it is 1.5",
    ]


def canary_gaps(folder: Path) -> dict[int, float]:
    name = "sync/canary_mean_gap"
    return {step: line[name] for step, line in lines_with_recovery(folder).items() if name in line}


@pytest.mark.parametrize("k", [1, 2])
def test_canary_tokens_come_with_the_batch_after_their_publication(tmp_path: Path, k: int) -> None:
    """They are judged by the weights that they were published with, and the trainer never waits for them
    alone."""
    freely = "actor_rollout_ref.rollout.sync_proof.gap_limit=9"
    waited: list[int] = []

    class Waited(World):
        def generate_on_each(self, requests: Sequence[GenerationRequest], options: Any) -> list[list[Sample]]:
            waited.append(self.version)
            return super().generate_on_each(requests, options)

    world = Waited()
    run(tmp_path, *ahead(k), f"{CANARIES}=2", freely, world=world)
    assert waited == [0, 4]  # at the start, and after the last step
    assert len(world.canaries) == 1
    found = canary_gaps(tmp_path)
    assert set(found) == {0, 3, 4}
    (canaries,) = world.canaries
    parts = [one for sample in canaries for one in sample.parts if isinstance(one, Part)]
    assert {one.version for one in parts} == {2}
    trained = SavedRun.load(tmp_path / "global_step_2")  # the weights then
    assert trained.state.step == 2
    weight = json.loads((tmp_path / "global_step_2" / "actor" / "weights").read_text())[0]
    gaps = torch.cat([log_probs_of(one.token_ids, weight) - one.log_probs for one in parts])
    expected = gaps.abs().double().mean()
    assert found[3] == pytest.approx(float(expected), rel=1e-6)


def test_canary_tokens_of_other_weights_end_the_run(tmp_path: Path) -> None:
    """T8: the version is the one published, but the tokens are not those of its weights."""

    class Keeping(World):
        def submit_to_each(self, requests: Sequence[GenerationRequest], options: Any) -> list[list[int]]:
            held, self.engine = self.engine, -1.0
            numbers = super().submit_to_each(requests, options)
            self.engine = held
            return numbers

    with pytest.raises(
        SyncProofError, match="canary tokens of rollout engine 0 at weight version 1: the mean"
    ):
        run(tmp_path, *ahead(1), f"{CANARIES}=1", world=Keeping())


class Mixed(World):
    """The last token of every response comes from another version."""

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        return [replace(one, parts=_mixed(one)) for one in super().take(numbers)]


def _mixed(sample: Sample) -> list[Part]:
    (whole,) = sample.parts
    assert isinstance(whole, Part)
    last = Part(whole.token_ids[-1:], whole.log_probs[-1:], version=1)
    return [Part(whole.token_ids[:-1], whole.log_probs[:-1], whole.version), last]


def test_a_response_of_two_versions_ends_the_run(tmp_path: Path) -> None:
    """T16."""
    with pytest.raises(RuntimeError, match="every response must come from one version"):
        run(tmp_path, *ahead(1), world=Mixed())


class Lagging(World):
    """Its engines never take the second update."""

    def deliver(self, version: int) -> tuple[None, None]:
        super().deliver(version)
        self.version = min(version, 1)
        return None, None


def test_a_version_older_than_the_bound_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: ages are read from what engines echo, not from what was asked of them."""
    with pytest.raises(RuntimeError, match=r"0 to 1 steps old.*\(number, age\): \[\(6, 2\), \(7, 2\)\]"):
        run(tmp_path, *ahead(1), "actor_rollout_ref.rollout.sync_proof.canary_freq=0", world=Lagging())


def test_a_producer_that_fails_is_an_error_where_the_trainer_waits(tmp_path: Path) -> None:
    """T11."""
    world = World()
    world.failure = RuntimeError("the engine's step loop ended")
    with pytest.raises(RuntimeError, match="step loop ended"):
        run(tmp_path, *ahead(1), world=world)


class Losing(World):
    """Its engine is lost while it is waited for, at one ``call``; the new one samples what was owed by the
    weights it gets."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls, self.asked = call, 0, {}  # type: ignore[var-annotated]
        self.owed: set[int] = set()

    def submit(self, requests: Sequence[GenerationRequest], options: Any, **_: Any) -> list[int]:
        numbers = super().submit(requests, options, **_)
        self.asked |= dict(zip(numbers, requests, strict=True))
        return numbers

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        self.calls += 1
        if self.calls == self.call:
            self.owed, self.under_way = self.under_way, set()
            replace_lost(EnginesLostError({0: ProcessLostError("rollout engine 0 died")}, {}))
            for number in self.owed:
                (self.answers[number],) = self.sample([self.asked[number]])
            self.under_way = self.owed
        return super().look(wait_seconds, replace_lost)

    def num_held(self, engines: Sequence[int]) -> int:
        return len(self.owed)

    def replace(self, engines: Sequence[int], timeout_seconds: float) -> None:
        pass

    def open(self) -> None:
        pass


@pytest.mark.parametrize(("call", "ages", "owed"), [(1, [0, 1, 1, 1], 8), (2, [0, 1, 0, 1], 4)])
def test_what_a_lost_engine_owed_is_sampled_again_once(
    tmp_path: Path, call: int, ages: list[int], owed: int
) -> None:
    """By the version it had while the trainer still holds that (call 1), else by a newer one."""
    world = Losing(call)
    run(tmp_path, *ahead(1), world=world)
    found = lines_with_recovery(tmp_path)
    assert [found[step]["async/group_age/max"] for step in range(1, STEPS + 1)] == ages
    assert sum(found[step]["recovery/engines_replaced"] for step in found) == 1
    assert sum(found[step]["recovery/requests_reissued"] for step in found) == owed
    assert [
        sorted({row["input"][0]["content"] for row in samples(tmp_path, step)}) for step in (1, 2, 3, 4)
    ] == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]


def lines_with_recovery(folder: Path) -> dict[int, dict[str, Any]]:
    given = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in given}


@pytest.mark.parametrize("hybrid", [True, False])
def test_engines_on_shared_devices_sleep_before_a_step_also_when_nothing_is_under_way(
    tmp_path: Path, hybrid: bool
) -> None:
    """All that a step needs may have ended before, or come from a checkpoint."""

    class Sleeping(World):
        slept = 0

        def sleep(self) -> None:
            self.slept += 1

    world = Sleeping()
    run(tmp_path, f"actor_rollout_ref.hybrid_engine={hybrid}", world=world)
    assert world.slept == hybrid * STEPS


class Asked(World):
    """Notes what was asked of the engines, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def submit(
        self, requests: Sequence[GenerationRequest], options: Any, *, evenly: bool, **_: Any
    ) -> list[int]:
        assert evenly
        self.calls.append(f"submit {len(requests)}")
        return super().submit(requests, options, **_)

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        """Half of what is under way has ended."""
        running = sorted(self.under_way)
        self.calls.append(f"collect from {len(running)}")
        return running[: -(-len(running) // 2)]

    def deliver(self, version: int) -> tuple[None, None]:
        self.calls.append(f"publish {version}")
        return super().deliver(version)


def test_a_group_is_scored_while_others_are_sampled(tmp_path: Path) -> None:
    """And what is trained on is the same."""
    scored_beside: list[int] = []

    class Watched(Scorer):
        def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
            scored_beside.append(len(world.under_way))
            return super().score(rows, texts)

    world = Asked()
    run(tmp_path / "parts", f"{CANARIES}=0", world=world, scorer=Watched())
    assert scored_beside == [2, 0] * STEPS
    run(tmp_path / "whole", f"{CANARIES}=0")
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert samples(tmp_path / "parts", 1) == samples(tmp_path / "whole", 1)


def test_without_a_lead_a_step_samples_all_of_its_own_and_nothing_else(tmp_path: Path) -> None:
    """Nothing is under way while weights are published or a checkpoint is written."""
    world = Asked()
    run(tmp_path, f"{CANARIES}=0", world=world, steps=2)
    step = ["submit 4", "collect from 4", "collect from 2", "collect from 1"]
    assert world.calls == ["publish 0", *step, "publish 1", *step, "publish 2"]
    for number in (1, 2):
        supply = SavedRun.load(tmp_path / f"global_step_{number}").state.supply
        assert supply is not None
        assert (supply.num_groups, supply.book.balance, supply.book.admitted) == (0, 0, 2 * number)
    assert not [name for name in lines(tmp_path)[1] if name.startswith("async/group_age")]


def test_open_groups_are_packed_where_a_checkpoint_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(supply_progress, "pack", lambda groups: packed.append(groups) or {})
    state = SupplyProgress(GroupBook(AdmissionRule(2, 2))).state()
    assert packed == []
    assert state.groups() == {}
    assert packed == [[]]
