"""An engine is lost with any of its processes, and all of them are replaced; processes are tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_rc.runtime.distributed.child_process import HangError, ProcessLostError, RemoteError
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.trainer.cluster import engine_group, further_nodes
from verl_rc.trainer.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.trainer.cluster.engine_work import EngineWork
from verl_rc.trainer.cluster.further_nodes import FurtherNodes
from verl_rc.trainer.cluster.placement import Placement

FAILED = RemoteError("connection closed by peer", RuntimeError("peer"))
OPTIONS = VllmOptions("org/model", "float32", 8)


@dataclass(eq=False)
class Call:
    """A call whose answer is known beforehand."""

    process: Any
    name: str
    answer: Any


@dataclass(eq=False)
class Process:
    """Notes what it is asked; its calls are of one answer each."""

    name: str
    answer: Any = None
    asked: list[Any] = field(default_factory=list)

    def note(self, *call: Any) -> Any:
        self.asked.append(call)
        return Call(self, self.name, self.answer)

    def listen(self, host: str | None) -> Any:
        return self.note("listen", host)

    def build(self, target: str, options: Any) -> Any:
        return self.note("build", target.partition(":")[2], options.node)

    def call(self, method: str) -> Any:
        return self.note(method)

    def kill(self) -> None:
        self.note("kill")

    def replace(self) -> None:
        self.note("replace")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of processes that have ended."""
    names: list[str] = []
    answered = lambda calls, _: [call for call in calls if call.name in names]  # noqa: E731
    monkeypatch.setattr(further_nodes, "first_answered", answered)
    monkeypatch.setattr(further_nodes, "wait_for_all", lambda calls: [("10.0.0.1", 7)])

    def as_completed(calls: Sequence[Any], *options: Any) -> Iterator[tuple[Any, Any]]:
        beside = options[-1]
        beside()
        return ((call, call.answer) for call in calls)

    monkeypatch.setattr(engine_group, "as_completed", as_completed)
    return names


def group_of_one(answer: Any = None) -> tuple[EngineGroup, Process, Process]:
    """A group of one engine on two nodes, which was built, and its processes."""
    first, second = Process("engine 0", answer), Process("engine 0 on its node 2")
    group = EngineGroup.__new__(EngineGroup)
    vars(group).update(_engines=[first], _further=[FurtherNodes(cast(Any, first), [cast(Any, second)])])
    vars(group).update(_work=EngineWork(1), _replaced=set(), _open={}, _submissions=[])
    group.build(OPTIONS, timeout_seconds=1.0)
    return group, first, second


def test_each_process_has_the_gpus_of_the_ranks_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str, Any]] = []

    def start(name: str, environment: dict[str, str], **options: Any) -> Process:
        started.append((name, environment["CUDA_VISIBLE_DEVICES"], options.get("max_concurrency")))
        return Process(name)

    monkeypatch.setattr(engine_group, "RemoteProcess", start)
    place: Any = SimpleNamespace(options=lambda reserve_gpu: {"num_gpus": int(reserve_gpu)})
    places, ranks = (place,) * 4, (place,) * 8
    EngineGroup(Placement("cuda", 8, 2, 1, 1, False, True, ranks, places), ["0", "1"] * 4)
    names = [f"rollout engine {engine}{node}" for engine in (0, 1) for node in ("", " on its node 2")]
    assert started == [(name, "0,1", slots) for name, slots in zip(names, [2, None] * 2, strict=True)]


@pytest.mark.usefixtures("ended")
def test_all_parts_meet_at_a_port_of_the_first() -> None:
    _, first, second = group_of_one()
    nodes = OPTIONS.on_nodes(2, "10.0.0.1", 7)
    assert first.asked == [("listen", None), ("build", "VllmEngine", nodes[0].node)]
    assert second.asked == [("build", "FurtherNode", nodes[1].node), ("serve",)]
    assert [one.node.number for one in nodes if one.node is not None] == [0, 1]


@pytest.mark.parametrize("failure", [FAILED, ProcessLostError("died"), HangError("silent")])
def test_a_failure_that_follows_from_a_lost_node_is_a_lost_engine(
    failure: RemoteError, ended: list[str]
) -> None:
    group, first, second = group_of_one(failure)
    ended.append(second.name)
    with pytest.raises(EnginesLostError, match=f"engine 0 on its node 2 has ended, .*: {failure}") as caught:
        group.wait({0: first.note("generate")})
    assert caught.value.engines == [0]
    assert first.asked.count(("kill",)) == 1
    first.answer = None
    ended.clear()
    group.replace([0], timeout_seconds=1.0)
    assert [process.asked.count(("replace",)) for process in (first, second)] == [1, 1]
    assert group.wait({0: first.note("generate")}) == ({0: None}, [])


def test_other_failures_stay_what_they_are(ended: list[str]) -> None:
    group, first, _ = group_of_one(FAILED)
    with pytest.raises(RemoteError, match="closed by peer") as caught:
        group.wait({0: first.note("generate")})
    assert caught.value is FAILED
    assert ("kill",) not in first.asked
    assert not ended


@pytest.mark.usefixtures("ended")
def test_an_engine_whose_first_process_has_no_address_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _, _ = group_of_one()

    def wait_for_all(_: Any) -> Any:
        raise ProcessLostError("died while it was to listen")

    monkeypatch.setattr(further_nodes, "wait_for_all", wait_for_all)
    with pytest.raises(EnginesLostError, match="to listen") as caught:
        group.replace([0], timeout_seconds=1.0)
    assert caught.value.engines == [0]
