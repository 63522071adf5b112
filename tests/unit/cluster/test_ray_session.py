"""What a new Ray session begins with."""

import pytest

from verl_rc.cluster.ray_session import start_ray
from verl_rc.cluster.watchdog import WATCHDOG, Watched
from verl_rc.config.trainer import RayInitConfig


class LeftOver(Watched):
    """A process of a Ray session that is over; its identity cannot be asked for any more."""

    name = "worker 3"
    last_answer = None

    @property
    def identity(self) -> object:
        raise AssertionError("a process of an earlier session was asked for")


def test_processes_of_an_earlier_session_are_not_watched_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setenv("PYTHONPATH", "")
    left_over = LeftOver()
    WATCHDOG.add(left_over)
    start_ray(RayInitConfig(), processes=1)
    WATCHDOG.end_all()
