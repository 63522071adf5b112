"""What the driver does while it waits for ranks: work beside, answers in order, and an end when a rank is
silent."""

from collections.abc import Sequence

import pytest

from verl_rc.runtime.distributed.child_process import HangError
from verl_rc.trainer.cluster import remote
from verl_rc.trainer.cluster.remote import Pending


class Slow:
    """Ray, whose calls are answered one after the other, each after some looks; nothing is answered without
    looks left."""

    def __init__(self, looks: int) -> None:
        self.looks, self.left = looks, looks
        self.timeouts: list[float | None] = []

    def wait(
        self, references: Sequence[int], num_returns: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        if not timeout and timeout is not None:  # a look at what else has ended
            return [], list(references)
        self.timeouts.append(timeout)
        self.left -= 1
        if self.left:
            return [], list(references)
        self.left = self.looks
        return [references[-1]], list(references[:-1])


class Process:
    name, last_answer = "actor rank", None


def pending(*references: int) -> list[Pending]:
    return [Pending(Process(), "update", reference) for reference in references]  # type: ignore[arg-type]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Slow:
    ray = Slow(3)
    monkeypatch.setattr(remote.ray, "wait", ray.wait)
    monkeypatch.setattr(remote, "_result_of", lambda item: item.reference * 10)
    return ray


def test_work_is_done_beside_until_all_have_answered(ray: Slow) -> None:
    done: list[int] = []
    assert remote.wait_for_all(pending(1, 2), while_waiting=lambda: done.append(1)) == [10, 20]
    assert len(done) == 4  # two looks without an answer for each of them
    assert set(ray.timeouts) == {0.25}


def test_without_work_beside_the_driver_waits_for_an_answer(
    ray: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.WATCHDOG, "limit_seconds", None, raising=False)
    ray.left = ray.looks = 1
    assert remote.wait_for_all(pending(1)) == [10]
    assert ray.timeouts == [None]


def test_a_silent_rank_ends_the_wait_with_work_beside_too(ray: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(remote.WATCHDOG, "report", lambda *_: "rank 0 is silent", raising=False)
    ray.left = ray.looks = 1000

    def work() -> None:
        now[0] += 1.0

    with pytest.raises(HangError, match="rank 0 is silent"):
        remote.wait_for_all(pending(1), timeout_seconds=5.0, while_waiting=work)
    assert now[0] == 5.0


def test_what_fails_beside_ends_the_wait(ray: Slow) -> None:
    def work() -> None:
        raise RuntimeError("an engine failed")

    with pytest.raises(RuntimeError, match="an engine failed"):
        remote.wait_for_all(pending(1), while_waiting=work)


def test_a_timed_wait_does_the_work_beside_too(ray: Slow) -> None:
    done: list[int] = []
    with remote.while_ranks_compute(lambda: done.append(1)):
        assert remote.wait_timed(pending(1)).result == [10]
    assert done
    done.clear()
    ray.left = ray.looks = 1
    remote.wait_timed(pending(1))
    assert not done


def test_what_is_answered_is_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of which two have been answered when the driver looks, then the third: two waits, and one
    look at what else is there."""
    looks: list[tuple[int, float | None]] = []

    def wait(references: list[int], num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        looks.append((len(references), timeout))
        ended = {3: references[:1], 2: references[:1] if timeout == 0 else [], 1: references}[len(references)]
        return ended, references[len(ended) :]

    monkeypatch.setattr(remote.ray, "wait", wait)
    monkeypatch.setattr(remote, "_result_of", lambda item: item.reference * 10)
    assert remote.wait_for_all(pending(1, 2, 3), timeout_seconds=9.0) == [10, 20, 30]
    assert [number for number, _ in looks] == [3, 2, 1]
