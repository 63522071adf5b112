"""What a new Ray session begins with, and what happens when it does not come up. ``ray.init`` is replaced."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from verl_rc.cluster import ray_session
from verl_rc.cluster.ray_session import RayStartError, start_ray
from verl_rc.cluster.watchdog import WATCHDOG, WatchedProcess
from verl_rc.config.run import RayInitConfig

TIMED_OUT = Exception("The current node timed out during startup.")


@pytest.fixture
def init_answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Lets calls of ``ray.init`` end with these answers, one after the other; returns the list of their
    arguments."""
    monkeypatch.setenv("PYTHONPATH", "")

    def answer_with(*answers: BaseException | None) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        waiting = iter(answers)

        def init(**options: Any) -> None:
            calls.append(options)
            answer = next(waiting)
            if answer is not None:
                raise answer

        monkeypatch.setattr("ray.init", init)
        return calls

    return answer_with


class LeftOver(WatchedProcess):
    """A process of a Ray session that is over; its identity cannot be asked for any more."""

    name = "worker 3"
    last_answer = None

    @property
    def identity(self) -> object:
        raise AssertionError("a process of an earlier session was asked for")


def test_processes_of_an_earlier_session_are_not_watched_any_more(
    init_answers: Callable[..., list[dict[str, Any]]],
) -> None:
    init_answers(None)
    left_over = LeftOver()
    WATCHDOG.add(left_over)
    start_ray(RayInitConfig(), processes=1)
    WATCHDOG.end_all()


def test_a_ray_that_does_not_come_up_is_started_again(
    init_answers: Callable[..., list[dict[str, Any]]],
) -> None:
    calls = init_answers(TIMED_OUT, TIMED_OUT, None)
    start_ray(RayInitConfig(), processes=3)
    assert [call["num_cpus"] for call in calls] == [3, 3, 3]


def test_the_third_failure_is_explained_in_one_line(
    init_answers: Callable[..., list[dict[str, Any]]],
) -> None:
    calls = init_answers(TIMED_OUT, TIMED_OUT, RuntimeError("the GCS\nis overloaded"))
    with pytest.raises(
        RayStartError, match=r"the GCS is overloaded.* load average .*ray_init.address=auto"
    ) as raised:
        start_ray(RayInitConfig(), processes=1)
    assert "\n" not in str(raised.value)
    assert len(calls) == 3


def test_what_would_fail_again_is_not_tried_again(init_answers: Callable[..., list[dict[str, Any]]]) -> None:
    calls = init_answers(ValueError("object_store_memory is larger than the shared memory"))
    with pytest.raises(RayStartError, match="object_store_memory"):
        start_ray(RayInitConfig(), processes=1)
    assert len(calls) == 1


def test_a_cluster_that_does_not_answer(init_answers: Callable[..., list[dict[str, Any]]]) -> None:
    calls = init_answers(ConnectionError("no such host"))
    with pytest.raises(
        RayStartError, match=r"must answer at ray_kwargs.ray_init.address=there:6379.*no such host"
    ):
        start_ray(RayInitConfig(address="there:6379"), processes=1)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("memory", "shared", "expected"),
    [(1000, 500, 100), (1000, 64, 32), (24, 12, 2.4), (4, 2, 0.5), (1000, 0.0625, 0.5)],
    ids=["a tenth of the memory", "half of the shared memory", "a small machine", "at least", "a container"],
)
def test_the_object_store_is_a_share_of_the_memory(
    memory: float, shared: float, expected: float, init_answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: in GiB; batches of long responses were written to disk."""
    monkeypatch.setattr(ray_session, "available_memory", lambda: int(memory * (1 << 30)))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=int(shared * (1 << 30))))
    calls = init_answers(None)
    start_ray(RayInitConfig(), processes=1)
    assert calls[0]["object_store_memory"] == pytest.approx(expected * (1 << 30))
