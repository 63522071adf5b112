"""Which engines count as lost, and that what they had, and nothing else, is asked for again."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from seed_completions import completions

from verl_rc.cluster import engine_group
from verl_rc.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.cluster.engine_work import EngineWork
from verl_rc.cluster.remote import HangError, ProcessLostError, RemoteError
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.step_loop import Sample
from verl_rc.weight_sync.transfer_group import TransferBrokenError

OPTIONS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=2, stop_token_ids=())
DEAD, SILENT = ProcessLostError("died"), HangError("silent")
BROKEN, MISTAKE = RemoteError("broken", TransferBrokenError("gone")), RemoteError("mistake", ValueError("mistake"))


class Call:
    """A call whose answer is known beforehand."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.reference = object()
        self.busy_seconds = 0.25


class Engine:
    """Answers with one-token rows that are the requests' seeds, as many as it is asked for, or fails as it is told."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.ended: list[Sample] = []
        self.failure: RemoteError | None = None
        self.replaced = 0

    def call(self, method: str, *arguments: Any, what: str | None = None) -> Call:
        if self.failure:
            return Call(self.failure)
        if method == "submit":
            [samples] = arguments
            assert all(sample.options == OPTIONS for sample in samples)
            assert all(sample.ahead == (sample.request.seed < 10) for sample in samples)  # seeds from 10 on: ``group.submit``
            self.asked.append([sample.request.seed for sample in samples])
            self.ended += samples
            return Call(None)
        assert (method, what) == ("collect", "generate")
        at_least, _ = arguments
        taken, self.ended = self.ended[:at_least], self.ended[at_least:]
        return Call(([sample.number for sample in taken], completions([sample.request.seed for sample in taken])))

    def replace(self) -> None:
        """Another one, that knows nothing of what this one was asked."""
        self.ended, self.failure = [], None
        self.replaced += 1

    def build(self, worker: str, options: Any) -> None:
        pass


def group_of(num_engines: int, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineGroup, list[Engine]]:
    def answers(calls: Sequence[Call], *_: Any) -> Iterator[tuple[Call, Any]]:
        return ((call, call.answer) for call in calls)

    monkeypatch.setattr(engine_group, "answers", answers)
    group = EngineGroup.__new__(EngineGroup)
    engines = [Engine() for _ in range(num_engines)]
    vars(group).update(_engines=engines, _timeout_seconds=1.0, _options=None, _work=EngineWork(num_engines), _replaced=set())
    vars(group).update(_submitting=[])
    return group, engines


def requests(*seeds: int) -> list[GenerationRequest]:
    """Two adjacent ones share a prompt."""
    return [GenerationRequest([seed // 2], seed) for seed in seeds]


@pytest.mark.parametrize("failure", [DEAD, SILENT])
def test_only_what_the_lost_engine_had_is_asked_for_again_and_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, failure: RemoteError
) -> None:
    group, engines = group_of(3, monkeypatch)
    losses: list[tuple[list[int], int]] = []

    def on_loss(lost: EnginesLostError, num_requests: int) -> None:
        losses.append((lost.engines, num_requests))
        group.replace(lost.engines)
        engines[1].failure = failure if len(losses) == 1 else None

    engines[1].failure = failure
    answer = group.generate(requests(*range(8)), OPTIONS, on_loss)
    assert answer.result.responses[:, 0].tolist() == list(range(8))
    assert answer.busy_seconds == 0.25
    assert [engine.asked for engine in engines] == [[[0, 1, 6]], [[2, 3, 7]], [[4, 5]]]
    assert losses == [([1], 3), ([1], 3)]
    assert [engine.replaced for engine in engines] == [0, 2, 0]


def test_without_on_loss_a_lost_engine_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(2, monkeypatch)
    engines[0].failure = DEAD
    with pytest.raises(EnginesLostError, match="died"):
        group.generate(requests(0), OPTIONS)
    assert group._work.busy_engines() == []  # nobody waits for it any more
    engines[0].failure = None
    assert group.generate(requests(5), OPTIONS).result.responses.tolist() == [[5]]


def test_samples_are_handed_over_now_and_collected_later_beside_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(2, monkeypatch)
    first = group.submit(requests(10, 11), OPTIONS)
    second = group.submit(requests(12, 13), OPTIONS)
    assert [engine.asked for engine in engines] == [[[10, 11]], [[12, 13]]]
    assert group.collect(0.1) == [first[0], second[0]]
    assert group.generate(requests(0, 1), OPTIONS).result.responses[:, 0].tolist() == [0, 1]
    assert group.collect(0.1) == [*first, *second]
    assert group.take([*second, *first]).responses[:, 0].tolist() == [12, 13, 10, 11]
    assert group.collect(0.1) == []


def test_what_was_handed_over_to_an_engine_that_is_lost_is_handed_to_the_next_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, engines = group_of(2, monkeypatch)
    engines[1].failure = DEAD
    numbers = group.submit(requests(10, 11, 12, 13), OPTIONS)
    with pytest.raises(EnginesLostError):
        group.collect(0.1)
    group.replace([1])  # as a publication that finds it does
    assert engines[1].asked == []
    collected = [group.collect(0.1) for _ in range(3)]
    assert engines[1].asked == [[12, 13]]
    assert collected == [[0, 1, 2], numbers, numbers]
    assert group.take(numbers).responses[:, 0].tolist() == [10, 11, 12, 13]


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
        group.wait({number: Call(answer) for number, answer in enumerate(engines)}, [Call(answer) for answer in beside])
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
        group.wait({number: Call(answer) for number, answer in enumerate(engines)}, [Call(answer) for answer in beside])
    assert not isinstance(caught.value, EnginesLostError)
