"""What a step tells: seconds, speeds by token, histograms, and once the stage that takes ten times its first
step."""

import math
import os

import pytest

from verl_rc.algorithm.supply.ledger import LedgerError
from verl_rc.metrics import Metric
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.step_record import Pace, StepRecord


class Recorder:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.histograms: list[tuple[str, int]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics = metrics

    def log_histogram(self, name: str, edges: list[float], counts: list[float], step: int) -> None:
        self.histograms.append((name, step))


def test_a_step_whose_books_do_not_balance_is_not_logged() -> None:
    record, recorder = StepRecord(), Recorder()
    record.ledger.add_sampled(tokens=10)
    with pytest.raises(LedgerError, match="10 sampled tokens"):
        record.log(recorder, 3)  # type: ignore[arg-type]
    assert recorder.metrics == {}


def test_a_metric_has_one_value_in_a_step() -> None:
    """The second of two values must not replace the first without a word; nor one that ranks report."""
    record = StepRecord()
    record.add({"actor/kl_coef": 0.5, "critic/score/mean": math.nan})
    record.add({"actor/kl_coef": 0.5, "critic/score/mean": math.nan})
    with pytest.raises(ValueError, match=r"one value in a step, but actor/kl_coef is 0\.5 and then 0\.25"):
        record.add({"actor/kl_coef": 0.25})
    record.add_records([Metric("actor/kl_coef", 1.0)])
    with pytest.raises(ValueError, match=r"one value in a step, but actor/kl_coef is 0\.5 and then 1\.0"):
        record.metrics()


def test_everything_reaches_the_tracker() -> None:
    record, recorder = StepRecord(), Recorder()
    record.add({"critic/score/mean": 1.0})
    record.add_records([Metric("actor/grad_norm", 1.0), Metric("actor/grad_norm", 3.0)])
    record.histograms["rollout_corr/log_ratio"] = [0.0, 1.0], [5.0]
    record.log(recorder, 3, {"training/epoch": 0})  # type: ignore[arg-type]
    assert recorder.metrics["actor/grad_norm"] == 2.0
    assert recorder.metrics["training/epoch"] == 0
    assert recorder.histograms == [("rollout_corr/log_ratio", 3)]


PLACEMENT = Placement("cpu", 1, 1, 3, 5, True, True, (), ())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(
        "verl_rc.trainer.step_record.log", lambda message, *arguments: messages.append(message % arguments)
    )
    monkeypatch.setattr("verl_rc.trainer.step_record.usable_cores", lambda: 2)
    return messages


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 1.0, 1.0))


@pytest.mark.usefixtures("load")
def test_a_stage_that_became_slow_is_named_once(said: list[str]) -> None:
    pace = Pace().after_step({"gen": 0.5, "adv": 0.001}, 1, PLACEMENT)
    pace = pace.after_step({"gen": 4.9, "adv": 0.9}, 2, PLACEMENT)  # ten times, but of milliseconds
    assert not said
    pace = pace.after_step({"gen": 5.1, "adv": 0.001}, 3, PLACEMENT)
    assert len(said) == 1
    assert said[0].startswith(
        "timing_s/gen took 5.1 s in step 3 and 0.50 s when it first ran. The load average is 9.0 on 2"
    )
    assert "an engine uses 5 of them and a trainer rank 3" in said[0]
    pace.after_step({"gen": 50.0}, 4, PLACEMENT)
    assert len(said) == 1


@pytest.mark.usefixtures("load")
def test_the_first_time_is_that_of_the_stage(said: list[str]) -> None:
    pace = Pace().after_step({"gen": 0.5}, 1, PLACEMENT)
    pace = pace.after_step({"gen": 0.5, "testing": 30.0}, 2, PLACEMENT)
    assert not said
    pace.after_step({"gen": 0.5, "testing": 301.0}, 3, PLACEMENT)
    assert said[0].startswith("timing_s/testing took 301.0 s")


def test_on_an_idle_machine_lengths_are_the_likely_cause(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 1.0, 1.0))
    Pace().after_step({"gen": 0.5}, 1, PLACEMENT).after_step({"gen": 6.0}, 2, PLACEMENT)
    assert "compare the lengths" in said[0]


def test_a_stage_that_an_engine_is_lost_in_is_timed() -> None:
    record = StepRecord()
    with pytest.raises(RuntimeError), record.stage("update_weights"):
        raise RuntimeError("lost")
    assert record.seconds["update_weights"] > 0
