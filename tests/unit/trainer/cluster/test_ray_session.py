"""What a new Ray session begins with, and what happens when it does not come up. ``ray.init`` is replaced."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from two_processes import free_port

from verl_rc.config.run import RayInitConfig
from verl_rc.trainer.cluster import ray_session
from verl_rc.trainer.cluster.ray_session import RayStartError, start_ray
from verl_rc.trainer.cluster.watchdog import WATCHDOG, WatchedProcess

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


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ValueError("num_gpus"), "change or drop what the message names"),
        (TypeError("env_vars"), "change or drop what the message names"),
        (OSError("AF_UNIX path length cannot exceed 107 bytes"), "set RAY_TMPDIR"),
        (PermissionError("/tmp/ray"), "set RAY_TMPDIR"),
    ],
)
def test_each_cause_has_its_own_remedy(
    error: Exception, remedy: str, init_answers: Callable[..., list[dict[str, Any]]]
) -> None:
    init_answers(error)
    with pytest.raises(RayStartError, match=remedy) as raised:
        start_ray(RayInitConfig(), processes=1)
    assert "load average" not in str(raised.value)


@pytest.mark.parametrize("address", [None, "local"])
def test_ray_starts_here_beside_the_address_of_another_cluster(
    address: str | None, init_answers: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would follow RAY_ADDRESS or its file of the last cluster if it were given no address."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6399")
    calls = init_answers(None)
    start_ray(RayInitConfig(address=address), processes=1)
    assert calls[0]["address"] == "local"


def test_a_machine_without_a_loopback_is_refused_before_ray_waits_for_it(
    init_answers: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = Mock(side_effect=OSError(101, "Network is unreachable"))
    monkeypatch.setattr(ray_session.socket, "create_connection", unreachable)
    calls = init_answers()
    with pytest.raises(RayStartError, match=r"127.0.0.1, but: .*unreachable.*ip link set lo up"):
        start_ray(RayInitConfig(), processes=1)
    assert calls == []


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "localhost:{}", "ray://127.0.0.1:{}", "auto"])
def test_a_cluster_without_a_listener_is_refused_before_ray_waits_for_it(
    address: str, init_answers: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_ANSWER_SECONDS", 0.01)
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")  # what auto means
    calls = init_answers()
    with pytest.raises(RayStartError, match=rf":{port}: ConnectionRefusedError.*start_head.sh"):
        start_ray(RayInitConfig(address=address.format(port)), processes=1)
    assert calls == []


def test_what_a_cluster_refuses_is_not_taken_for_its_absence(
    init_answers: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_require_answer", lambda address: None)
    init_answers(TypeError("working_dir"))
    with pytest.raises(RayStartError, match=r"working_dir.*change or drop what the message names"):
        start_ray(RayInitConfig(address="there:6379"), processes=1)


@pytest.mark.parametrize("address", ["nowhere", "there:port", "ray://there"])
def test_an_address_that_is_none_is_refused(
    address: str, init_answers: Callable[..., list[dict[str, Any]]]
) -> None:
    init_answers()
    with pytest.raises(RayStartError, match=f"must answer at ray_kwargs.ray_init.address={address}"):
        start_ray(RayInitConfig(address=address), processes=1)


def test_a_cluster_that_does_not_answer(
    init_answers: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_require_answer", lambda address: None)
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
