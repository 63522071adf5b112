"""The modes of asynchronous training, with formulas for processes: orders, publications, filters, failures,
ages of tokens."""

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compared_runs import lines as lines_by_step
from compared_runs import samples
from formula_run import Scorer, World, live, prompt_stream
from small_models import small_run_config

from verl_rc.algorithm.health.run_limits import TooManyFailedGroupsError
from verl_rc.algorithm.rewards import RewardError, RewardOutput
from verl_rc.algorithm.supply.group_book import AdmissionRule
from verl_rc.config.errors import ConfigError
from verl_rc.records.batches import Timed, TokenBatch, TokenScores
from verl_rc.records.dataset import PromptRow
from verl_rc.records.parts import Sample
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.trainer.cluster.engine_group import EnginesLostError
from verl_rc.trainer.cluster.remote import work_beside
from verl_rc.trainer.setup import steps_of_run
from verl_rc.trainer.stop import StoppedByAlertError
from verl_rc.trainer.supply.supply_progress import SupplyProgress

OWN_DEVICES = "actor_rollout_ref.hybrid_engine=False"
NO_CANARIES = "actor_rollout_ref.rollout.sync_proof.canary_freq=0"
FILTER = "algorithm.filter_groups.enable=True"
REMAX = "algorithm.adv_estimator=remax"
LEAD: dict[str, Any] = {"staleness_threshold": 1.0, "partial_rollout": False}


pytestmark = pytest.mark.usefixtures("no_processes")


class Slow(World):
    """What is under way ends by chance, one after the other; new weights may come under it."""

    def __init__(self, seed: int, cuts: bool = False) -> None:
        super().__init__()
        self.rng, self.cuts = random.Random(seed), cuts
        self.ended: set[int] = set()
        self.published: list[int] = []

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        running = sorted(self.under_way - self.ended)
        self.ended |= {number for number in running if self.rng.random() < 0.3} or set(running[:1])
        return sorted(self.ended & self.under_way)

    def deliver(self, version: int) -> tuple[None, None]:
        self.published.append(version)
        kept, self.under_way = self.under_way, set() if self.cuts else self.under_way
        result = super().deliver(version)
        self.under_way = kept
        return result


def run(
    folder: Path,
    *overrides: str,
    state: RunState | None = None,
    checkpoint: Path | None = None,
    **options: Any,
) -> World:
    folder.mkdir(exist_ok=True)
    dump = f"trainer.rollout_data_dir={folder / 'rollouts'}"
    return live(folder, state or RunState(), checkpoint, dump, NO_CANARIES, *overrides, **options)


def resume(whole: Path, folder: Path, step: int, *overrides: str, **options: Any) -> World:
    checkpoint = whole / f"global_step_{step}"
    return run(folder, *overrides, state=SavedRun.load(checkpoint).state, checkpoint=checkpoint, **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the steps, without times."""
    return [line for step, line in lines_by_step(folder).items() if step > 0]


def prompts(folder: Path, steps: Sequence[int]) -> list[str]:
    """Of every group that was trained on, in order."""
    return [row["input"][0]["content"] for step in steps for row in samples(folder, step)[::2]]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def alerts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "alerts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_column(folder: Path, name: str) -> list[float]:
    return [one[name] for one in lines(folder)]


# The rule in the driver


Setting = tuple[str, int, str, str | None, int]
"""Order, M, k, K and B."""
SETTINGS: list[Setting] = [  # every other one with weights that change under running responses
    ("admitted", 1, "1", None, 2),
    ("admitted", 2, "1", None, 1),
    ("admitted", 3, "0", None, 2),
    ("admitted", 2, "1.5", None, 1),
    ("ready", 1, "1", "1", 2),
    ("ready", 1, "1", "2", 1),
    ("ready", 2, "0.5", "1", 2),
    ("ready", 1, "0.5", None, 2),
    ("ready", 1, "2", "3", 3),
    ("ready", 3, "0", None, 1),
    ("ready", 3, "1", "2", 1),
]


def section(setting: Setting, **more: Any) -> dict[str, Any]:
    order, every, staleness, hard, _ = setting
    bounds = {
        "staleness_threshold": float(staleness),
        "max_off_policy_threshold": None if hard is None else float(hard),
    }
    return {"order": order, "trigger_parameter_sync_step": every, **bounds, **more}


def size(setting: Setting) -> str:
    return f"data.train_batch_size={setting[-1]}"


def bound_of(setting: Setting) -> int:
    order, every, staleness, hard, _ = setting
    publications = Fraction(staleness if order == "admitted" or hard is None else hard)
    return math.ceil(every * (1 + publications)) - 1


@pytest.mark.parametrize(
    ("setting", "partial"), [(setting, place % 2 == 0) for place, setting in enumerate(SETTINGS)], ids=str
)
def test_the_rule_holds_in_the_driver_whatever_ends_first(
    tmp_path: Path, setting: Setting, partial: bool
) -> None:
    """T19, T3: the driver admits, waits and trains by the rule; every prompt is trained on once, and the
    books close."""
    steps, seen = 9, 0
    for seed in (1, 2):
        folder = tmp_path / f"{seed}"
        world = Slow(seed, cuts=partial)
        run(
            folder,
            OWN_DEVICES,
            size(setting),
            world=world,
            steps=steps,
            **section(setting, partial_rollout=partial),
        )
        ages = of_column(folder, "async/group_age/max")
        assert len(ages) == steps
        assert max(ages) <= bound_of(setting)
        seen = max(seen, int(max(ages)))
        every = setting[1]
        assert world.published == [step for step in range(steps + 1) if step % every == 0 or step == steps]
        assert saved_steps(folder) == world.published[1:]
        state = SavedRun.load(folder / f"global_step_{steps}").state.supply
        assert state is not None
        assert {fate: totals.groups for fate, totals in state.book.ended.items() if totals.groups} == {
            "trained": steps * setting[-1]
        }
        assert not world.under_way
        numbers = Counter(prompts(folder, range(1, steps + 1)))
        assert numbers == Counter(str(number % 12) for number in range(steps * setting[-1]))
    in_order = setting[0] == "admitted"
    assert seen == bound_of(setting) or not in_order  # by completion only an unlucky order reaches it


def test_by_completion_a_batch_does_not_wait_for_a_straggler_that_may_come_later(tmp_path: Path) -> None:
    """And by admission it does: the order is no dead key."""

    class Straggling(Slow):
        """The first sample ends last."""

        def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
            running = sorted(self.under_way - self.ended)
            self.ended |= set(running[-1:])
            return sorted(self.ended & self.under_way)

    first = {}
    for order in ("admitted", "ready"):
        folder = tmp_path / order
        run(
            folder,
            OWN_DEVICES,
            world=Straggling(0),
            order=order,
            partial_rollout=False,
            trigger_parameter_sync_step=2,
        )
        first[order] = prompts(folder, [1, 2])
    assert first == {"admitted": ["0", "1", "2", "3"], "ready": ["2", "3", "0", "1"]}


def test_the_wait_for_older_groups_is_told_from_the_wait_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second passes at every look at the clock: each wait takes one, and those with a batch's worth of
    groups are counted."""
    ticks = iter(range(10_000))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), monotonic=lambda: 0.0)
    monkeypatch.setattr("verl_rc.trainer.supply.supply.time", clock)

    class InReverse(Slow):
        def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
            running = sorted(self.under_way - self.ended)
            self.ended |= set(running[-2:])  # a group
            return sorted(self.ended & self.under_way)

    waited = {}
    for order in ("admitted", "ready"):
        mode = {"partial_rollout": False, "trigger_parameter_sync_step": 2, "order": order}
        run(tmp_path / order, OWN_DEVICES, world=InReverse(0), steps=2, **mode)
        given = (tmp_path / order / "metrics.jsonl").read_text().splitlines()
        waited[order] = [json.loads(line)["async/wait_for_oldest_s"] for line in given[1:]]
    # Groups 3, 2, 1, 0 end one after the other. Groups 3 and 2 would be a batch, but in order 1 and 0 are
    # waited for.
    assert waited["admitted"][0] > waited["admitted"][1] == 0
    assert waited["ready"] == [0, 0]


# Several steps per publication


@pytest.mark.parametrize(("every", "staleness"), [(1, 1), (2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("cut", [(), ("ppo_epochs=2",), ("ppo_mini_batch_size=2",)])
def test_ages_are_those_of_the_plan(tmp_path: Path, every: int, staleness: int, cut: tuple[str, ...]) -> None:
    """T23: they count steps, however many mini-batches and epochs a step has; T14: the proximal policy is the
    one before it."""

    class Watching(World):
        def __init__(self) -> None:
            super().__init__()
            self.updates_before: list[int] = []

        def compute_log_probs(self, tokens: Ragged[TokenBatch], limit: Any) -> Timed[Ragged[TokenScores]]:
            self.updates_before.append(self.updates)
            return super().compute_log_probs(tokens, limit)

    world, steps = Watching(), 7
    mode = {
        "trigger_parameter_sync_step": every,
        "staleness_threshold": float(staleness),
        "partial_rollout": False,
    }
    run(
        tmp_path,
        OWN_DEVICES,
        *(f"actor_rollout_ref.actor.{one}" for one in cut),
        world=world,
        steps=steps,
        **mode,
    )
    expected = []
    for step in range(1, steps + 1):
        versions = (
            version for version in range(0, steps, every) if step <= version + every * (1 + staleness)
        )
        expected.append(step - 1 - min(versions))
    assert of_column(tmp_path, "async/group_age/max") == expected
    assert of_column(tmp_path, "async/token_age/mean") == expected
    assert world.updates_before[-steps:] == list(range(steps))  # the first of all are canaries


def test_a_run_of_several_steps_per_publication_resumes_to_the_bit(tmp_path: Path) -> None:
    """T1: checkpoints are those of steps that publish; ``save_freq`` is rounded up to them."""
    mode = {"trigger_parameter_sync_step": 2, "staleness_threshold": 1.0, "partial_rollout": False}
    run(tmp_path / "whole", OWN_DEVICES, "trainer.save_freq=3", world=Slow(1), steps=7, **mode)
    assert saved_steps(tmp_path / "whole") == [4, 7]
    resume(tmp_path / "whole", tmp_path / "again", 4, OWN_DEVICES, world=Slow(2), steps=7, **mode)
    found, expected = lines(tmp_path / "again"), lines(tmp_path / "whole")[4:]
    for one, two in zip(found, expected, strict=True):
        assert one | {"async/length_ratio": 1} == two | {"async/length_ratio": 1}  # which depends on time
    assert [samples(tmp_path / "again", step) for step in (5, 6, 7)] == [
        samples(tmp_path / "whole", step) for step in (5, 6, 7)
    ]


@pytest.mark.parametrize("mode", [LEAD, {"trigger_parameter_sync_step": 3}])
def test_schedules_have_the_steps_of_the_synchronous_run(tmp_path: Path, mode: dict[str, Any]) -> None:
    """T18: learning rates follow the number of steps, which is known before the first model is built."""
    given = ["trainer.total_epochs=2", "trainer.total_training_steps=7", OWN_DEVICES]
    config = small_run_config(tmp_path, *given)
    section = config.async_training.model_copy(update=mode)
    asynchronous = config.model_copy(update={"async_training": section})
    for steps_of_epoch in (2, 3, 9):
        assert steps_of_run(asynchronous.trainer, steps_of_epoch) == steps_of_run(
            config.trainer, steps_of_epoch
        )


def test_only_published_weights_are_validated(tmp_path: Path) -> None:
    world = Slow(1)
    mode = {"trigger_parameter_sync_step": 2, "staleness_threshold": 1.0, "partial_rollout": False}
    run(tmp_path, OWN_DEVICES, "trainer.test_freq=2", world=world, steps=5, **mode)
    validated = [one["step"] for one in lines(tmp_path) if any(name.startswith("val-core") for name in one)]
    assert validated == [2, 4, 5]


STOPS_AT_ONCE = ("trainer.alerts.mismatch=save_and_stop", "trainer.alerts.mismatch_limit=1e-9")


def test_a_run_that_stops_between_two_publications_loses_nothing(tmp_path: Path) -> None:
    """What was sampled is kept, the rest is sampled by the weights of the step at which it goes on."""
    mode = {"trigger_parameter_sync_step": 3, "staleness_threshold": 1.0, "partial_rollout": False}
    with pytest.raises(StoppedByAlertError):
        run(tmp_path / "one", OWN_DEVICES, *STOPS_AT_ONCE, world=Slow(5), steps=6, **mode)
    assert saved_steps(tmp_path / "one") == [1]
    state = SavedRun.load(tmp_path / "one" / "global_step_1").state.supply
    assert state is not None
    ended = [sample["ended"] for group in state.groups()["groups"] for sample in group["samples"]]
    assert any(ended)
    assert not all(ended)
    world = Slow(6)
    resume(tmp_path / "one", tmp_path / "two", 1, OWN_DEVICES, world=world, steps=6, **mode)
    assert world.published == [1, 3, 6]
    trained = prompts(tmp_path / "one", [1]) + prompts(tmp_path / "two", range(2, 7))
    assert trained == [str(number) for number in range(12)]
    assert max(of_column(tmp_path / "two", "async/group_age/max")) <= 5


class Sharing(Slow):
    """Engines on the trainer's devices: only one of both works."""

    awake = False

    def wake_up(self, tag: str) -> None:
        self.awake = True

    def sleep(self) -> None:
        assert not self.under_way
        self.awake = False

    def compute_log_probs(self, tokens: Ragged[TokenBatch], limit: Any) -> Timed[Ragged[TokenScores]]:
        assert self.updates == 0 or not self.awake, "the engines hold the devices"
        return super().compute_log_probs(tokens, limit)


def test_engines_that_share_devices_end_what_they_have_before_training(tmp_path: Path) -> None:
    world = Sharing(3)
    run(tmp_path, world=world, steps=5, trigger_parameter_sync_step=2)
    assert of_column(tmp_path, "async/group_age/max") == [0, 1, 0, 1, 0]
    assert world.published == [0, 2, 4, 5]


def test_a_fraction_of_a_batch_is_drawn_prompt_by_prompt(tmp_path: Path) -> None:
    """k = 0.5 of batches of 3: the prompts left of a draw wait, also over a resume."""
    mode = {"staleness_threshold": 0.5, "order": "ready", "partial_rollout": False}
    size_of_step = "data.train_batch_size=3"
    run(tmp_path / "whole", OWN_DEVICES, size_of_step, world=Slow(1), steps=6, **mode)
    state = SavedRun.load(tmp_path / "whole" / "global_step_2").state.supply
    assert state is not None
    assert state.book.admitted == math.ceil(3 * (2 + 1.5))
    assert len(state.drawn) == 1
    resume(
        tmp_path / "whole", tmp_path / "again", 2, OWN_DEVICES, size_of_step, world=Slow(1), steps=6, **mode
    )
    trained = prompts(tmp_path / "whole", [1, 2]) + prompts(tmp_path / "again", range(3, 7))
    assert Counter(trained) == Counter(str(number % 12) for number in range(18))


# Groups that tell nothing


class Telling(Scorer):
    """Every third prompt has samples that differ."""

    def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
        return [
            RewardOutput(
                float(row.row_index % 3 == 0 and place % 2) + len(text) / 1000 * (row.row_index % 3 == 0), {}
            )
            for place, (row, text) in enumerate(zip(rows, texts, strict=True))
        ]


@pytest.mark.parametrize("staleness", [1, 2])
def test_groups_that_tell_nothing_are_replaced_at_once(tmp_path: Path, staleness: int) -> None:
    """T13: two of three are filtered, and the run goes on; what it trains on does not depend on what ends
    first."""
    mode = {"staleness_threshold": float(staleness), "partial_rollout": False}
    for seed in (1, 2):
        run(tmp_path / f"{seed}", OWN_DEVICES, FILTER, world=Slow(seed), scorer=Telling(), steps=5, **mode)
    one, two = tmp_path / "1", tmp_path / "2"
    assert [samples(one, step) for step in range(1, 6)] == [samples(two, step) for step in range(1, 6)]
    assert prompts(one, range(1, 6)) == [str(3 * number % 12) for number in range(10)]
    assert of_column(one, "async/group_age/max") == [min(step, staleness) for step in range(5)]
    assert (
        sum(of_column(one, "ledger/prompts_filtered"))
        == 2 * sum(of_column(one, "ledger/prompts_in_batch")) - 2
    )
    assert all(count > 0 for count in of_column(one, "ledger/filtered_tokens")[:3])
    ratios = [line["training/filter_groups/informative_ratio"] for line in lines(one)[:2]]
    assert all(0 < ratio < 0.6 for ratio in ratios)


def test_what_replaces_a_group_begins_while_the_trainer_works(tmp_path: Path) -> None:
    """The driver serves the supply while it waits for ranks; what is trained on stays the same."""

    class Served(Slow):
        """Half of what is under way ends during an update, while the driver waits."""

        training = False

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.submitted_in_updates = self.evaluations_served = 0

        def submit(self, requests: Sequence[GenerationRequest], options: Any, **_: Any) -> list[int]:
            self.submitted_in_updates += len(requests) * self.training
            return super().submit(requests, options, **_)

        def compute_log_probs(self, tokens: Ragged[TokenBatch], limit: Any) -> Timed[Ragged[TokenScores]]:
            if (work := work_beside.get()) is not None:  # canary tokens are evaluated without
                self.evaluations_served += 1
                work()
            return super().compute_log_probs(tokens, limit)

        def update(self, *arguments: Any) -> Any:
            self.training = True
            for _ in range(20):
                decide_ended_groups = work_beside.get()
                assert decide_ended_groups is not None
                decide_ended_groups()
            self.training = False
            return super().update(*arguments)

    world = Served(1)
    run(tmp_path / "served", OWN_DEVICES, FILTER, world=world, scorer=Telling(), steps=5, **LEAD)
    run(tmp_path / "not", OWN_DEVICES, FILTER, world=Slow(2), scorer=Telling(), steps=5, **LEAD)
    assert world.submitted_in_updates > 0
    assert world.evaluations_served == 5
    assert [samples(tmp_path / "served", step) for step in range(1, 6)] == [
        samples(tmp_path / "not", step) for step in range(1, 6)
    ]


def test_an_engine_lost_while_the_trainer_works_is_replaced_afterwards(tmp_path: Path) -> None:
    """The ranks cannot send weights in the middle of an update."""

    class LostInUpdate(Slow):
        lost = 0

        def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
            if replace_lost is None:
                self.lost += 1
                raise EnginesLostError({0: ProcessLostError("rollout engine 0 died")}, {})
            return super().look(wait_seconds, replace_lost)

        def update(self, *arguments: Any) -> Any:
            decide_ended_groups = work_beside.get()
            assert decide_ended_groups is not None
            decide_ended_groups()
            return super().update(*arguments)

    world = LostInUpdate(1)
    run(tmp_path, OWN_DEVICES, world=world, **LEAD)
    assert world.lost > 0
    assert prompts(tmp_path, (1, 2, 3, 4)) == [str(number) for number in range(8)]


def test_a_run_that_filters_resumes_to_the_bit(tmp_path: Path) -> None:
    mode = {"staleness_threshold": 1.0, "partial_rollout": False}
    run(tmp_path / "whole", OWN_DEVICES, FILTER, world=Slow(1), scorer=Telling(), steps=5, **mode)
    resume(
        tmp_path / "whole",
        tmp_path / "again",
        2,
        OWN_DEVICES,
        FILTER,
        world=Slow(7),
        scorer=Telling(),
        steps=5,
        **mode,
    )
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")[2:]
    assert [samples(tmp_path / "again", step) for step in (3, 4, 5)] == [
        samples(tmp_path / "whole", step) for step in (3, 4, 5)
    ]


def test_informative_groups_beyond_a_batch_stay_for_the_next_step(tmp_path: Path) -> None:
    """Where nothing is filtered nothing is thrown away: the same steps as without the filter."""

    class AllTell(Telling):
        def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
            return [RewardOutput(float(place % 2), {}) for place in range(len(rows))]

    mode = {"staleness_threshold": 2.0, "partial_rollout": False}
    for name, overrides in (("with", [FILTER]), ("without", [])):
        run(tmp_path / name, OWN_DEVICES, *overrides, world=Slow(1), scorer=AllTell(), **mode)
    assert [samples(tmp_path / "with", step) for step in (1, 2, 3, 4)] == [
        samples(tmp_path / "without", step) for step in (1, 2, 3, 4)
    ]
    assert of_column(tmp_path / "with", "ledger/surplus_tokens") == [0, 0, 0, 0]


def test_too_few_groups_that_tell_anything_end_the_run(tmp_path: Path) -> None:
    class NoneTells(Telling):
        def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
            return [RewardOutput(1.0, {}) for _ in rows]

    limit = "algorithm.filter_groups.max_num_gen_batches=3"
    with pytest.raises(ValueError, match=r"max_num_gen_batches=3 batches of 2 prompts gave 0"):
        run(tmp_path, OWN_DEVICES, FILTER, limit, world=Slow(1), scorer=NoneTells(), **LEAD)


# Greedy baselines


def test_greedy_responses_are_sampled_with_their_groups(tmp_path: Path) -> None:
    """Also without a lead."""
    for name, mode in (("synchronous", {}), ("ahead", LEAD)):
        asked: Counter[float] = Counter()

        class Asked(Slow):
            def submit(self, requests: Sequence[GenerationRequest], options: Any, **_: Any) -> list[int]:
                asked[options.temperature] += len(requests)  # noqa: B023
                return super().submit(requests, options, **_)

        run(tmp_path / name, OWN_DEVICES, REMAX, world=Asked(1), **mode)
        assert asked == {1.0: 16, 0.0: 8}  # four steps of two prompts: two samples and a greedy response each
        assert all(tokens > 0 for tokens in of_column(tmp_path / name, "ledger/baseline_tokens"))


@pytest.mark.parametrize("step", [1, 2])
def test_greedy_responses_are_saved(tmp_path: Path, step: int) -> None:
    mode = {"staleness_threshold": 1.0, "partial_rollout": False}
    run(tmp_path / "whole", OWN_DEVICES, REMAX, world=Slow(1), **mode)
    resume(tmp_path / "whole", tmp_path / "again", step, OWN_DEVICES, REMAX, world=Slow(2), **mode)
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")[step:]


# Groups that fail


class Failing(Scorer):
    """Samples of some prompts have no score, as often as it is said."""

    def __init__(self, **times: int) -> None:
        self.left = {int(row.removeprefix("row")): count for row, count in times.items()}

    def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
        for index in {row.row_index for row in rows}:
            if len({row.row_index for row in rows}) == 1 and self.left.get(index, 0) > 0:
                self.left[index] -= 1
                raise RewardError(f"row {index} has no score.")
            if self.left.get(index, 0) > 0:
                raise RewardError("one of several.")
        return super().score(rows, texts)


def test_a_group_that_failed_is_sampled_once_more_under_its_number(tmp_path: Path) -> None:
    run(tmp_path / "sound", OWN_DEVICES, world=Slow(1), **LEAD)
    run(tmp_path / "again", OWN_DEVICES, world=Slow(1), scorer=Failing(row3=1), **LEAD)
    assert prompts(tmp_path / "again", (1, 2, 3, 4)) == prompts(tmp_path / "sound", (1, 2, 3, 4))
    sound, again = samples(tmp_path / "sound", 2), samples(tmp_path / "again", 2)
    assert sound[:2] == again[:2]
    assert sound[2:] != again[2:]  # other seeds
    assert sum(of_column(tmp_path / "again", "async/failed_groups")) == 0


def test_a_group_that_fails_again_is_replaced_and_counted(tmp_path: Path) -> None:
    run(tmp_path, OWN_DEVICES, world=Slow(1), scorer=Failing(row3=2), **LEAD)
    assert prompts(tmp_path, (1, 2, 3, 4)) == ["0", "1", "2", "4", "5", "6", "7", "8"]
    assert sum(of_column(tmp_path, "async/failed_groups")) == 1
    state = SavedRun.load(tmp_path / "global_step_4").state.supply
    assert state is not None
    assert state.book.ended["failed"].groups == 1
    assert state.failed.first_error == "row 3 has no score."


def test_more_than_one_failed_group_in_a_hundred_ends_the_run_with_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(
        TooManyFailedGroupsError, match=r"but 2 did; the first error of the run: row 1 has no score\."
    ):
        run(tmp_path, OWN_DEVICES, world=Slow(1), scorer=Failing(row1=2, row4=2), **LEAD)


class Unlucky(Slow):
    """Of some groups' samples both fail, as often as it is said, counted by the order in which groups are
    submitted."""

    def __init__(self, seed: int, fails: Sequence[int], cuts: bool = False) -> None:
        super().__init__(seed, cuts)
        self.fails, self.failed = set(fails), set[int]()

    def failures(self, numbers: Sequence[int]) -> dict[int, str]:
        found = {
            number: f"the tool of request {number} failed." for number in numbers if number // 2 in self.fails
        }
        self.failed |= set(found)
        self.under_way -= set(found)
        return found

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        assert not self.failed & set(numbers)
        return super().take(numbers)


@pytest.mark.parametrize("partial", [False, True])
def test_a_sample_whose_tool_fails_fails_its_group_which_is_sampled_once_more(
    tmp_path: Path, partial: bool
) -> None:
    """T12: under its number, with other seeds."""
    mode = {"staleness_threshold": 1.0, "partial_rollout": partial, "order": "admitted"}
    run(tmp_path / "sound", OWN_DEVICES, world=Slow(1, cuts=partial), **mode)
    world = Unlucky(1, [1], cuts=partial)
    run(tmp_path / "again", OWN_DEVICES, world=world, **mode)
    assert world.failed
    assert prompts(tmp_path / "again", (1, 2, 3, 4)) == prompts(tmp_path / "sound", (1, 2, 3, 4))
    sound, again = samples(tmp_path / "sound", 1), samples(tmp_path / "again", 1)
    assert sound[:2] == again[:2]
    assert sound[2:] != again[2:]
    assert sum(of_column(tmp_path / "again", "async/failed_groups")) == 0


def test_a_group_whose_tools_fail_again_is_replaced_and_more_than_one_in_a_hundred_end_the_run(
    tmp_path: Path,
) -> None:
    run(
        tmp_path / "one", OWN_DEVICES, world=Unlucky(1, [1, 4]), **LEAD
    )  # the fifth group submitted is the second again
    assert prompts(tmp_path / "one", (1, 2, 3, 4)) == ["0", "2", "3", "4", "5", "6", "7", "8"]
    assert sum(of_column(tmp_path / "one", "async/failed_groups")) == 1
    state = SavedRun.load(tmp_path / "one" / "global_step_4").state.supply
    assert state is not None
    assert state.failed.first_error.startswith("the tool of request ")
    with pytest.raises(
        TooManyFailedGroupsError, match=r"the first error of the run: the tool of request \d+ failed\."
    ):
        run(tmp_path / "all", OWN_DEVICES, world=Unlucky(1, range(100)), **LEAD)


class Hanging(Slow):
    """A request is never answered, the first time."""

    hung: int | None = None

    def submit(self, requests: Sequence[GenerationRequest], options: Any, **_: Any) -> list[int]:
        numbers = super().submit(requests, options, **_)
        self.hung = numbers[1] if self.hung is None else self.hung
        return numbers

    def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
        super().look(wait_seconds, replace_lost)
        return sorted((self.ended & self.under_way) - {self.hung})


def test_a_group_that_takes_too_long_is_sampled_once_more(tmp_path: Path) -> None:
    """T12: a straggler cannot wedge the run, and its prompt is not lost."""
    world = Hanging(1)
    run(tmp_path, OWN_DEVICES, world=world, group_timeout_seconds=0.2, **LEAD)
    assert prompts(tmp_path, (1, 2, 3, 4)) == [str(number) for number in range(8)]
    assert sum(of_column(tmp_path, "async/failed_groups")) == 0


# Groups that grow too old, and tokens


def test_groups_that_grow_too_old_are_dropped_and_replaced(tmp_path: Path) -> None:
    """T2: also over a resume nothing is trained on twice, and the dropped number is not waited for."""

    class OneIsSlow(Slow):
        """All ends at once, but the first sample of all."""

        def look(self, wait_seconds: float, replace_lost: Any = None) -> list[int]:
            return sorted(self.under_way - {0})

    mode = {
        "staleness_threshold": 1.0,
        "max_off_policy_threshold": 1.0,
        "max_off_policy_strategy": "drop",
        "order": "ready",
    }
    world = OneIsSlow(1, cuts=True)
    run(tmp_path / "whole", OWN_DEVICES, world=world, steps=6, **mode)
    state = SavedRun.load(tmp_path / "whole" / "global_step_6").state.supply
    assert state is not None
    assert state.book.ended["stale"].groups == 1
    assert sum(of_column(tmp_path / "whole", "async/dropped_tokens")) > 0  # of the sample that had ended
    assert prompts(tmp_path / "whole", range(1, 7)).count("0") == 1  # of the next epoch
    assert max(of_column(tmp_path / "whole", "async/group_age/max")) <= 1
    resume(tmp_path / "whole", tmp_path / "again", 3, OWN_DEVICES, world=Slow(4, cuts=True), steps=6, **mode)
    saved = SavedRun.load(tmp_path / "again" / "global_step_6").state.supply
    assert saved is not None
    ended = {fate: totals.groups for fate, totals in saved.book.ended.items() if totals.groups}
    assert ended.keys() == {"trained", "stale"}
    assert sum(ended.values()) == saved.book.admitted


def test_old_tokens_leave_the_loss_and_the_baseline_keeps_them(tmp_path: Path) -> None:
    mode = {"trigger_parameter_sync_step": 2, "staleness_threshold": 0.0, "partial_rollout": False}
    section = "algorithm.rollout_correction"
    no_rule = [
        f"{section}.{key}=null"
        for key in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_target_acceptance")
    ]
    run(tmp_path / "all", OWN_DEVICES, *no_rule, world=World(), **mode)
    run(tmp_path / "young", OWN_DEVICES, *no_rule, world=World(), max_token_age=0, **mode)
    every, young = lines(tmp_path / "all"), lines(tmp_path / "young")
    assert all(
        young[step]["ledger/rejected_tokens"] == young[step]["ledger/sampled_tokens"] for step in (1, 3)
    )
    assert every[3]["ledger/rejected_tokens"] == 0
    assert young[0]["ledger/rejected_tokens"] == every[0]["ledger/rejected_tokens"]
    assert young[1]["critic/advantages/mean"] == every[1]["critic/advantages/mean"]


def test_lengths_that_differ_are_an_alert_after_twenty_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SupplyProgress, "length_ratio", 0.95)
    run(tmp_path, OWN_DEVICES, world=World(), steps=22, **LEAD)
    found = [one for one in alerts(tmp_path) if "lengths" in one["title"]]
    assert [one["step"] for one in found] == [20]
    assert "async/length_ratio must be within 2% of 1 after 20 steps, it is 0.950" in found[0]["text"]
    resume(tmp_path, tmp_path / "again", 21, OWN_DEVICES, world=World(), steps=22, **LEAD)
    assert not [one for one in alerts(tmp_path / "again") if "lengths" in one["title"]]  # it was sent


def test_the_end_says_how_long_the_trainer_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("verl_rc.trainer.supply.supply.log", lambda text, *values: said.append(text % values))
    run(tmp_path, OWN_DEVICES, world=World(), **LEAD)
    (line,) = [one for one in said if "waited" in one]
    assert line.startswith("the trainer waited for samples ")
    assert "with staleness_threshold=1" in line


def test_a_resumed_run_goes_on_with_all_that_its_supply_had_counted(tmp_path: Path) -> None:
    """What the end says of waiting is about the whole run, and dynamic sampling does not begin to count
    anew."""
    mode: dict[str, Any] = {
        "staleness_threshold": 0.0,
        "trigger_parameter_sync_step": 2,
        "partial_rollout": False,
    }
    run(tmp_path / "whole", OWN_DEVICES, world=World(), **mode)
    resume(tmp_path / "whole", tmp_path / "again", 2, OWN_DEVICES, world=World(), **mode)
    supplies = [SavedRun.load(tmp_path / name / "global_step_4").state.supply for name in ("whole", "again")]
    assert [supply.waits.steps for supply in supplies if supply is not None] == [4, 4]
    checkpoint = tmp_path / "whole" / "global_step_2"
    state = SavedRun.load(checkpoint).state
    assert state.supply is not None
    counted = dataclasses.replace(state, supply=dataclasses.replace(state.supply, filtered_since_batch=6))
    saved = SupplyProgress.resumed(AdmissionRule(2, 2), prompt_stream(), counted.supply).state()
    assert (saved.filtered_since_batch, saved.waits.steps) == (6, 2)
    limit = "algorithm.filter_groups.max_num_gen_batches=3"
    with pytest.raises(ValueError, match="max_num_gen_batches=3 batches of 2 prompts gave 0"):
        run(
            tmp_path / "few",
            OWN_DEVICES,
            FILTER,
            limit,
            world=Slow(1),
            state=counted,
            checkpoint=checkpoint,
            **mode,
        )


# Resuming


def test_a_resumed_run_without_a_saved_prompt_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    run(tmp_path / "whole", OWN_DEVICES, world=World(), **LEAD)
    checkpoint = tmp_path / "whole" / "global_step_2"
    state = SavedRun.load(checkpoint).state
    assert state.supply is not None
    groups = [{**group, "row_index": 99} for group in state.supply.groups()["groups"]]
    packed = {**state.supply.groups(), "groups": groups}
    broken = dataclasses.replace(state.supply, groups=lambda: packed)
    with pytest.raises(ConfigError, match=r"^there is no row 99\.$"):
        run(
            tmp_path / "again",
            OWN_DEVICES,
            state=dataclasses.replace(state, supply=broken),
            checkpoint=checkpoint,
            **LEAD,
        )
