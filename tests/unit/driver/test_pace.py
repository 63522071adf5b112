"""A stage that takes ten times its first step is reported once, with the likely cause."""

import os

import pytest

from verl_rc.cluster.placement import Placement
from verl_rc.driver.step_record import Pace

PLACEMENT = Placement("cpu", 1, 1, 3, 5, True, True, (), ())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr("verl_rc.driver.step_record.say", lambda message, *arguments: messages.append(message % arguments))
    monkeypatch.setattr("verl_rc.driver.step_record.usable_cores", lambda: 2)
    return messages


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 1.0, 1.0))


@pytest.mark.usefixtures("load")
def test_a_stage_that_became_slow_is_named_once(said: list[str]) -> None:
    pace = Pace().observed({"gen": 0.5, "adv": 0.001}, 1, PLACEMENT)
    pace = pace.observed({"gen": 4.9, "adv": 0.9}, 2, PLACEMENT)  # ten times, but of milliseconds
    assert not said
    pace = pace.observed({"gen": 5.1, "adv": 0.001}, 3, PLACEMENT)
    assert len(said) == 1
    assert said[0].startswith("timing_s/gen took 5.1 s in step 3 and 0.50 s when it first ran. The load average is 9.0 on 2")
    assert "engine uses 5 and a trainer rank 3" in said[0]
    pace.observed({"gen": 50.0}, 4, PLACEMENT)
    assert len(said) == 1


@pytest.mark.usefixtures("load")
def test_the_first_time_is_that_of_the_stage(said: list[str]) -> None:
    pace = Pace().observed({"gen": 0.5}, 1, PLACEMENT)
    pace = pace.observed({"gen": 0.5, "testing": 30.0}, 2, PLACEMENT)
    assert not said
    pace.observed({"gen": 0.5, "testing": 301.0}, 3, PLACEMENT)
    assert said[0].startswith("timing_s/testing took 301.0 s")


def test_on_an_idle_machine_lengths_are_the_likely_cause(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 1.0, 1.0))
    Pace().observed({"gen": 0.5}, 1, PLACEMENT).observed({"gen": 6.0}, 2, PLACEMENT)
    assert "compare the lengths" in said[0]
