"""What a step tells: seconds, speeds by token, histograms."""

import pytest

from verl_rc.driver.step_record import StepRecord, StepTokens
from verl_rc.metrics import Metric, check_names
from verl_rc.ppo.ledger import LedgerError


class Recorder:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.histograms: list[tuple[str, int]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics = metrics

    def log_histogram(self, name: str, edges: list[float], counts: list[float], step: int) -> None:
        self.histograms.append((name, step))


def test_milliseconds_per_token_by_what_a_stage_works_on() -> None:
    tokens = StepTokens(response=100, total=400, num_devices=2)
    found = tokens.milliseconds_per_token({"gen": 0.5, "update_actor": 2.0, "reward": 9.0})
    assert found == {"timing_per_token_ms/gen": 5.0, "timing_per_token_ms/update_actor": 5.0}


def test_throughput_counts_the_devices_of_all_pools() -> None:
    record = StepRecord()
    with record.stage("gen"):
        record.count_tokens(10, 40, num_devices=2)
    metrics = record.metrics()
    assert metrics["perf/throughput"] == pytest.approx(40 / (metrics["timing_s/step"] * 2))
    assert 0 <= metrics["perf/overhead_fraction"] <= 1
    check_names(metrics)


def test_only_tokens_trained_on_are_useful() -> None:
    record = StepRecord()
    record.count_tokens(10, 40, num_devices=2)
    record.ledger.book({"trained": 6, "rejected": 4})
    metrics = record.metrics()
    assert metrics["perf/useful_tokens_per_second"] == pytest.approx(6 / metrics["timing_s/step"])
    check_names(metrics)


def test_a_step_whose_books_do_not_balance_is_not_logged() -> None:
    record, recorder = StepRecord(), Recorder()
    record.ledger.sampled(tokens=10)
    with pytest.raises(LedgerError, match="10 sampled tokens"):
        record.log(recorder, 3)  # type: ignore[arg-type]
    assert recorder.metrics == {}


def test_everything_reaches_the_tracker() -> None:
    record, recorder = StepRecord(), Recorder()
    record.add({"critic/score/mean": 1.0})
    record.add_records([Metric("actor/grad_norm", 1.0), Metric("actor/grad_norm", 3.0)])
    record.add_histogram("rollout_corr/log_ratio", [0.0, 1.0], [5.0])
    record.log(recorder, 3, {"training/epoch": 0})  # type: ignore[arg-type]
    assert recorder.metrics["actor/grad_norm"] == 2.0
    assert recorder.metrics["training/epoch"] == 0
    assert recorder.histograms == [("rollout_corr/log_ratio", 3)]
