"""Which engines count as lost, and that what they had, and nothing else, is asked for again."""

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_samples import first_tokens, sample

from verl_rc.records.parts import token_ids
from verl_rc.runtime.distributed.child_process import HangError, ProcessLostError, RemoteError
from verl_rc.runtime.rollout.engine import Collected, Interrupted, Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.transfer_group import TransferBrokenError
from verl_rc.trainer.cluster import engine_group
from verl_rc.trainer.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.trainer.cluster.engine_work import AssignedRequest, EngineWork
from verl_rc.trainer.cluster.further_nodes import FurtherNodes

OPTIONS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=2, stop_token_ids=())
TIMEOUT = 1.0
DEAD, SILENT = ProcessLostError("died"), HangError("silent")
BROKEN, MISTAKE = (
    RemoteError("broken", TransferBrokenError("gone")),
    RemoteError("mistake", ValueError("mistake")),
)


class Call:
    """A call whose answer is known beforehand."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.reference = object()
        self.sent_at = time.time()


class Engine:
    """Answers with one-token rows that are the requests' seeds, as many as it is asked for, or fails as it is
    told."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.ended: list[Request] = []
        self.fails: set[int] = set()
        """Seeds of samples that fail."""
        self.failure: RemoteError | None = None
        self.replaced = 0
        self.start: RemoteError | None = None
        """Why it does not start, if it does not."""
        self.cut = Interrupted([])
        self.told: list[Any] = []
        self.parts: list[list[int]] = []
        """Tokens that each submitted sample came with."""

    def call(self, method: str, *arguments: Any, task: str | None = None) -> Call:
        if self.failure:
            return Call(self.failure)
        if method == "submit":
            [samples] = arguments
            assert all(sample.options == OPTIONS for sample in samples)
            assert all(
                sample.has_priority == (sample.request.seed < 10) for sample in samples
            )  # seeds from 10 on: ``group.submit``
            self.asked.append([sample.request.seed for sample in samples])
            self.ended += samples
            self.parts += [
                [int(token) for part in sample.request.so_far.parts for token in part.token_ids]
                for sample in samples
            ]
            return Call(None)
        if method == "interrupted":
            return Call(self.cut)
        if method in ("resume", "finish", "cancel"):
            self.told.append((method, *arguments))
            return Call(None)
        assert (method, task) == ("collect", "generate")
        at_least, *_ = arguments
        taken, self.ended = self.ended[:at_least], self.ended[at_least:]
        failures = {one.number: "the tool failed" for one in taken if one.request.seed in self.fails}
        taken = [one for one in taken if one.number not in failures]
        return Call(Collected([sample(one.number, [one.request.seed]) for one in taken], failures))

    def replace(self) -> None:
        """Another one, that knows nothing of what this one was asked."""
        self.ended, self.failure = [], None
        self.replaced += 1

    def build(self, worker: str, options: Any) -> Call:
        return Call(self.start)


def group_of(
    num_engines: int, monkeypatch: pytest.MonkeyPatch, deterministic_steps: int | None = None
) -> tuple[EngineGroup, list[Engine]]:
    def as_completed(calls: Sequence[Call], *_: Any) -> Iterator[tuple[Call, Any]]:
        return ((call, call.answer) for call in calls)

    monkeypatch.setattr(engine_group, "as_completed", as_completed)
    monkeypatch.setattr(engine_group, "first_answered", lambda calls, _: calls)
    monkeypatch.setattr(engine_group, "shared", lambda argument: argument)
    group = EngineGroup.__new__(EngineGroup)
    engines = [Engine() for _ in range(num_engines)]
    vars(group).update(_engines=engines, _timeout_seconds=1.0, _work=EngineWork(num_engines), _replaced=set())
    options = SimpleNamespace(worker="room:Engine", deterministic=deterministic_steps is not None)
    vars(group).update(_options=options)
    vars(group).update(_submissions=[], _open={}, _further=[FurtherNodes(cast(Any, one)) for one in engines])
    return group, engines


def of_owners(ended: Sequence[AssignedRequest]) -> dict[str, int]:
    """The first token of each owner's sample, in order."""
    return {request.owner: first_tokens([request.sample])[0] for request in ended}


def requests(*seeds: int) -> list[GenerationRequest]:
    """Two adjacent ones share a prompt."""
    return [GenerationRequest([seed // 2], seed) for seed in seeds]


@pytest.mark.parametrize("failure", [DEAD, SILENT])
def test_only_what_the_lost_engine_had_is_asked_for_again_and_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, failure: RemoteError
) -> None:
    group, engines = group_of(3, monkeypatch)
    losses: list[tuple[list[int], int]] = []

    def replace_lost(lost: EnginesLostError) -> None:
        losses.append((lost.engines, group.num_held(lost.engines)))
        group.replace(lost.engines, TIMEOUT)
        engines[1].failure = failure if len(losses) == 1 else None

    engines[1].failure = failure
    assert first_tokens(group.generate(requests(*range(8)), OPTIONS, replace_lost)) == list(range(8))
    assert [engine.asked for engine in engines] == [[[0, 1, 6]], [[2, 3, 7]], [[4, 5]]]
    assert losses == [([1], 3), ([1], 3)]
    assert [engine.replaced for engine in engines] == [0, 2, 0]


def test_an_engine_that_was_replaced_holds_nothing_until_it_gets_what_the_old_one_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, _ = group_of(2, monkeypatch)
    group.submit(requests(10, 11, 12, 13), OPTIONS, owners="abcd")
    assert group.num_held([0, 1]) == 4
    group.replace([1], TIMEOUT)
    assert [group.num_held([engine]) for engine in range(2)] == [2, 0]
    group.submit([], OPTIONS, owners="")
    assert [group.num_held([engine]) for engine in range(2)] == [2, 2]


def test_without_on_loss_a_lost_engine_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(2, monkeypatch)
    engines[0].failure = DEAD
    with pytest.raises(EnginesLostError, match="died"):
        group.generate(requests(0), OPTIONS)
    assert group._work.num_busy() == {}  # nobody waits for it any more
    engines[0].failure = None
    assert first_tokens(group.generate(requests(5), OPTIONS)) == [5]


def test_samples_are_handed_over_now_and_collected_later_beside_a_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, engines = group_of(2, monkeypatch)
    group.submit(requests(10, 11), OPTIONS, owners="ab")
    group.submit(requests(12, 13), OPTIONS, owners="cd")
    assert [engine.asked for engine in engines] == [[[10, 11]], [[12, 13]]]
    assert of_owners(group.collect(0.1)) == {"a": 10, "c": 12}
    assert first_tokens(group.generate(requests(0, 1), OPTIONS)) == [0, 1]
    assert of_owners(group.collect(0.1)) == {"b": 11, "d": 13}
    assert group.collect(0.1) == group.submitted() == []


def test_what_was_handed_over_to_an_engine_that_is_lost_is_handed_to_the_next_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, engines = group_of(2, monkeypatch)
    engines[1].failure = DEAD
    group.submit(requests(10, 11, 12, 13), OPTIONS, owners="abcd")
    with pytest.raises(EnginesLostError):
        group.collect(0.1)
    group.replace([1], TIMEOUT)  # as a publication that finds it does
    assert engines[1].asked == []
    collected = [of_owners(group.collect(0.1)) for _ in range(3)]
    assert engines[1].asked == [[12, 13]]
    assert collected == [{"a": 10, "b": 11, "c": 12}, {"d": 13}, {}]


def test_what_an_update_cut_is_known_and_a_lost_engines_samples_continue_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T8: the new engine gets them when it is asked for samples, which is after an update of all weights."""
    group, engines = group_of(2, monkeypatch)
    group.submit(requests(10, 11, 12, 13), OPTIONS, owners="abcd")
    for engine, (number, token) in zip(engines, [(1, 51), (3, 53)], strict=True):
        engine.ended = engine.ended[:1]  # the other one still runs
        engine.cut = Interrupted([sample(number, [token])], pause_seconds=number)
    monkeypatch.setattr(Engine, "call", whole_answers(Engine.call))
    ended, interrupted = group.collect_parts()
    assert of_owners(ended) == {"a": 10, "c": 12}
    assert {engine: one.pause_seconds for engine, one in interrupted.items()} == {0: 1, 1: 3}
    known = {one.owner: token_ids(one.queued.request.so_far.parts) for one in group.submitted()}
    assert known == {"b": [51], "d": [53]}
    engines[1].failure = DEAD
    with pytest.raises(EnginesLostError):
        group.collect_parts()
    engines[1].parts.clear()
    group.replace([1], TIMEOUT)
    assert engines[1].parts == []
    group.collect(0.1)
    assert engines[1].parts == [[53]]


def whole_answers(call: Any) -> Any:
    """Of ``call``, where asking for no sample at least gives all that have ended."""

    def answered(self: Engine, method: str, *arguments: Any, task: str | None = None) -> Call:
        return call(self, method, *((len(self.ended), 0.0) if method == "collect" else arguments), task=task)

    return answered


def test_with_a_limit_of_steps_engines_are_told_when_to_go_on_and_for_which_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, engines = group_of(2, monkeypatch, deterministic_steps=5)
    group.submit(requests(10, 11, 12), OPTIONS, owners="abc")
    group.begin_steps()
    assert not group._submissions  # they were waited for, so that the steps begin with them
    assert first_tokens(group.finish(group.submitted())) == [10, 11, 12]
    assert [engine.told for engine in engines] == [[("resume",), ("finish", [0, 1, 2])]] * 2
    group.submit(requests(14, 15), OPTIONS, owners="de")
    group.replace([1], TIMEOUT)
    group.collect(0.1)
    assert [engine.told[2:] for engine in engines] == [
        [("resume",)]
    ] * 2  # an update for the new one has stopped all


def test_with_a_limit_of_steps_a_new_engine_is_told_what_is_required_when_it_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for ever for the end of samples that were required before it had them."""
    group, (engine,) = group_of(1, monkeypatch, deterministic_steps=4)
    group.submit(requests(10, 11), OPTIONS, owners="ab")

    def replace_lost(lost: EnginesLostError) -> None:
        group.replace(lost.engines, TIMEOUT)
        engine.told.clear()

    engine.failure = DEAD
    group.wait_for(group.submitted(), replace_lost)
    assert engine.asked == [[10, 11], [10, 11]]
    assert engine.told == [("resume",), ("finish", [0, 1])]


def test_an_engine_has_what_is_generated_before_it_is_told_to_finish_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs two calls at a time: the second could overtake the first."""
    group, _ = group_of(1, monkeypatch, deterministic_steps=4)
    events: list[str] = []
    call, wait = Engine.call, EngineGroup.wait

    def noted_call(engine: Engine, method: str, *arguments: Any, **options: Any) -> Call:
        events.append(method)
        return call(engine, method, *arguments, **options)

    def noted_wait(group: EngineGroup, *arguments: Any, **options: Any) -> Any:
        events.append("wait")
        return wait(group, *arguments, **options)

    monkeypatch.setattr(Engine, "call", noted_call)
    monkeypatch.setattr(EngineGroup, "wait", noted_wait)
    group.generate(requests(0, 1), OPTIONS)
    assert events == ["submit", "wait", "finish", "wait", "collect", "wait"]


def test_a_sample_that_failed_is_collected_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(1, monkeypatch)
    engines[0].fails = {1, 11}
    group.submit(requests(10, 11, 12), OPTIONS, owners="abc")
    collected = [one for _ in range(3) for one in group.collect(0.1)]
    assert [one.owner for one in collected] == ["a", "b", "c"]
    assert collected[1].outcome == "the tool failed"
    assert first_tokens([collected[0].sample, collected[2].sample]) == [10, 12]
    with pytest.raises(EpisodeFailedError, match=r"^the tool failed$"):
        group.generate(requests(0, 1), OPTIONS)


def test_cancelled_requests_are_stopped_and_never_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(2, monkeypatch)
    group.submit(requests(10, 11, 12, 13), OPTIONS, owners="abcd")
    group.cancel(group.submitted()[1:3])
    assert [engine.told for engine in engines] == [[("cancel", [1, 2])]] * 2
    group.replace([1], TIMEOUT)
    group.collect(0.1)
    assert engines[1].asked[1:] == [[13]]
    assert group._work._cancelled == {1: 0}  # a new engine does not answer what the old one had


def test_without_a_limit_engines_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(2, monkeypatch)
    group.submit(requests(10, 11, 12), OPTIONS, owners="abc")
    group.begin_steps()
    group.replace([1], TIMEOUT)
    group.finish(group.submitted())
    assert [engine.told for engine in engines] == [[], []]


@pytest.mark.parametrize(
    ("engines", "beside", "lost"),
    [
        ([DEAD, 5], [BROKEN], [0]),
        ([BROKEN, DEAD], [BROKEN], [1]),
        ([5, SILENT], [BROKEN], [1]),
        ([SILENT, SILENT], [SILENT], [0, 1]),
        ([MISTAKE, DEAD], [], [1]),
    ],
)
def test_engines_that_died_or_are_silent_are_lost(
    monkeypatch: pytest.MonkeyPatch, engines: list[Any], beside: list[Any], lost: list[int]
) -> None:
    group, _ = group_of(2, monkeypatch)
    with pytest.raises(EnginesLostError) as caught:
        group.wait(
            {number: Call(answer) for number, answer in enumerate(engines)},
            [Call(answer) for answer in beside],
        )
    assert caught.value.engines == lost
    assert caught.value.answered == {number: answer for number, answer in enumerate(engines) if answer == 5}


@pytest.mark.parametrize(
    ("engines", "beside", "message"),
    [
        ([MISTAKE, SILENT], [], "mistake"),
        ([5, 5], [DEAD], "died"),
        ([BROKEN, 5], [BROKEN], "broken"),
        ([BROKEN, 5], [DEAD], "died"),
        ([5, SILENT], [DEAD], "died"),
        ([MISTAKE, 5], [BROKEN], "mistake"),
    ],
)
def test_what_no_new_engine_would_mend_is_raised(
    monkeypatch: pytest.MonkeyPatch, engines: list[Any], beside: list[Any], message: str
) -> None:
    group, _ = group_of(2, monkeypatch)
    with pytest.raises(RemoteError, match=message) as caught:
        group.wait(
            {number: Call(answer) for number, answer in enumerate(engines)},
            [Call(answer) for answer in beside],
        )
    assert not isinstance(caught.value, EnginesLostError)


@pytest.mark.parametrize("failure", [DEAD, SILENT, MISTAKE])
def test_engines_that_do_not_start_are_lost_and_the_others_have_started(
    monkeypatch: pytest.MonkeyPatch, failure: RemoteError
) -> None:
    group, engines = group_of(3, monkeypatch)
    group.submit(requests(10, 11, 12, 13, 14, 15), OPTIONS, owners="abcdef")
    engines[2].start = failure
    with pytest.raises(EnginesLostError, match=str(failure)) as caught:
        group.replace([1, 2], TIMEOUT)
    assert caught.value.engines == [2]
    engines[2].start = None
    group.replace(caught.value.engines, TIMEOUT)
    assert [engine.replaced for engine in engines] == [0, 1, 2]
    group.collect(0.1)
    assert [engine.asked for engine in engines] == [[[10, 11]], [[12, 13]] * 2, [[14, 15]] * 2]


@pytest.mark.parametrize("call", ["generate", "submit"])
def test_work_that_comes_after_a_replacement_is_handed_over_once(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """An engine that was lost in an update owes nothing: the next samples must not be submitted twice."""
    group, engines = group_of(2, monkeypatch)
    group.replace([0], TIMEOUT)
    if call == "generate":
        assert first_tokens(group.generate(requests(0, 1), OPTIONS)) == [0, 1]
        assert first_tokens(group.generate(requests(2, 3), OPTIONS)) == [2, 3]
    else:
        group.submit(requests(10, 11), OPTIONS, owners="ab")
        collected = [one for _ in range(4) for one in group.collect(0.0)]
        assert of_owners(collected) == {"a": 10, "b": 11}
    seeds = [seed for engine in engines for asked in engine.asked for seed in asked]
    assert len(seeds) == len(set(seeds))


def open_calls(
    monkeypatch: pytest.MonkeyPatch, answering: set[int]
) -> tuple[EngineGroup, list[Engine], list[Call]]:
    """A group of two engines of which ``answering`` answer open calls, and the calls that were made."""
    group, engines = group_of(2, monkeypatch)
    made: list[Call] = []
    of_engine = {}
    call = Engine.call

    def noted(engine: Engine, method: str, *arguments: Any, **options: Any) -> Call:
        made.append(call(engine, method, *arguments, **options))
        of_engine[made[-1]] = engines.index(engine)
        return made[-1]

    monkeypatch.setattr(Engine, "call", noted)
    monkeypatch.setattr(
        engine_group, "first_answered", lambda calls, _: [one for one in calls if of_engine[one] in answering]
    )
    group.submit(requests(10, 11, 12, 13), OPTIONS, owners="abcd")
    made.clear()
    return group, engines, made


def test_a_call_stays_open_while_an_engine_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine 1 has one call however often the driver looks; engine 0 has a further one for its second
    sample, and none once it has nothing left."""
    answering = {0}
    group, _, made = open_calls(monkeypatch, answering)
    assert [of_owners(group.collect(0.1)) for _ in range(4)] == [{"a": 10}, {"b": 11}, {}, {}]
    assert len(made) == 3
    answering.add(1)
    assert [of_owners(group.collect(0.1)) for _ in range(2)] == [{"c": 12}, {"d": 13}]
    assert len(made) == 4


def test_an_engine_that_does_not_answer_an_open_call_is_lost_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was waited before counts, and its successor gets its samples."""
    group, engines, made = open_calls(monkeypatch, {0})
    group.collect(0.1)
    silent, limits = made[1], []
    silent.answer = SILENT

    def as_completed(calls: Sequence[Call], limit: float, *_: Any) -> Iterator[tuple[Call, Any]]:
        limits.append(limit)
        return ((call, call.answer) for call in calls)

    monkeypatch.setattr(engine_group, "as_completed", as_completed)
    silent.sent_at -= group._timeout_seconds + 1
    with pytest.raises(EnginesLostError, match="silent") as caught:
        group.collect(0.1)
    assert caught.value.engines == [1]
    assert limits == [0.0]
    group.replace([1], TIMEOUT)
    group.collect(0.1)
    assert engines[1].asked == [[12, 13], [12, 13]]


def test_samples_that_are_waited_for_may_come_by_the_open_call(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _, made = open_calls(monkeypatch, set())
    group.collect(0.1)  # opens a call to both
    waited = group.submitted()
    group.wait_for(waited)
    assert first_tokens([request.sample for request in waited]) == [10, 11, 12, 13]
    assert len(made) == 4  # the open calls had one sample each
