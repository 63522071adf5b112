"""Which engines count as lost, and that their whole shares, and nothing else, are asked for again."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from verl_rc.cluster import engine_group
from verl_rc.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.cluster.remote import HangError, ProcessLostError, RemoteError
from verl_rc.data.batches import Completions
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
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
    """Answers with one-token rows that are the requests' seeds, or fails as it is told."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.failure: RemoteError | None = None

    def call(self, method: str, requests: list[GenerationRequest], options: SamplingOptions) -> Call:
        assert (method, options) == ("generate", OPTIONS)
        seeds = [request.seed for request in requests]
        self.asked.append(seeds)
        return Call(self.failure or completions(seeds))


def completions(seeds: list[int]) -> Completions:
    tokens = torch.tensor(seeds)[:, None]
    return Completions(
        responses=tokens,
        response_lengths=torch.ones_like(tokens[:, 0]),
        rollout_log_probs=torch.zeros(tokens.shape),
        policy_versions=torch.zeros_like(tokens),
        finished=torch.ones(len(seeds), dtype=torch.bool),
        batch_size=[len(seeds)],
    )


def group_of(num_engines: int, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineGroup, list[Engine]]:
    def answers(calls: Sequence[Call], *_: Any) -> Iterator[tuple[Call, Any]]:
        return ((call, call.answer) for call in calls)

    monkeypatch.setattr(engine_group, "answers", answers)
    group = EngineGroup.__new__(EngineGroup)
    engines = [Engine() for _ in range(num_engines)]
    vars(group).update(_engines=engines, _timeout_seconds=1.0)
    return group, engines


@pytest.mark.parametrize("failure", [DEAD, SILENT])
def test_only_the_lost_share_is_asked_for_again_and_as_a_whole(monkeypatch: pytest.MonkeyPatch, failure: RemoteError) -> None:
    group, engines = group_of(3, monkeypatch)
    engines[1].failure = failure
    losses: list[tuple[list[int], int]] = []

    def on_loss(lost: EnginesLostError, num_requests: int) -> None:
        losses.append((lost.engines, num_requests))
        engines[1].failure = None if len(losses) == 2 else failure

    answer = group.generate([GenerationRequest([1], seed) for seed in range(8)], OPTIONS, on_loss)
    assert answer.result.responses[:, 0].tolist() == list(range(8))
    assert answer.busy_seconds == 0.25
    assert [engine.asked for engine in engines] == [[[0, 1, 2]], [[3, 4, 5]] * 3, [[6, 7]]]
    assert losses == [([1], 3), ([1], 3)]


def test_without_somebody_who_replaces_them_the_loss_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engines = group_of(2, monkeypatch)
    engines[0].failure = DEAD
    with pytest.raises(EnginesLostError, match="died"):
        group.generate([GenerationRequest([1], 0)], OPTIONS)


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
