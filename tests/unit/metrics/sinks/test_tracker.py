"""Opening sinks by name, and handing everything to all of them."""

import subprocess
import sys
from contextlib import nullcontext

import pytest

from verl_rc.config.run import TrainerConfig
from verl_rc.metrics.sinks import Tracker, open_tracker


class RecordingSink:
    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def log(self, *arguments):
        self.calls.append(("log", *arguments))

    def log_table(self, *arguments):
        self.calls.append(("log_table", *arguments))

    def log_histogram(self, *arguments):
        self.calls.append(("log_histogram", *arguments))

    def alert(self, *arguments):
        self.calls.append(("alert", *arguments))

    def close(self):
        self.calls.append(("close",))
        if self.fails:
            raise OSError("disk full")


def test_environments_have_a_thousand_names_in_a_run():
    sink = RecordingSink()
    tracker = Tracker([sink])
    for step in range(3):
        names = [f"{group}/{step}_{index}" for group in ("env", "val-aux/s/env") for index in range(200)]
        others = {"a": 1.0, "env/again": 3.0, f"environment/{step}": 4.0}
        tracker.log({**others, **dict.fromkeys(names, 2.0)}, step)
    logged = [metrics for _, metrics, _ in sink.calls]
    assert [len(metrics) for metrics in logged] == [403, 403, 203]  # the last: 1,000 - 801 new ones
    assert [metrics.get("env/names_dropped/max") for metrics in logged] == [None, None, 201.0]
    assert all(metrics["a"] == 1.0 and metrics["env/again"] == 3.0 for metrics in logged)


def test_everything_reaches_every_sink():
    sinks = [RecordingSink(), RecordingSink()]
    tracker = Tracker(sinks)
    tracker.log({"a": 1.0}, step=1)
    tracker.log_table("t", ["x"], [[1]], step=2)
    tracker.log_histogram("h", [0.0, 1.0], [3], step=3)
    tracker.close()
    expected = [
        ("log", {"a": 1.0}, 1),
        ("log_table", "t", ["x"], [[1]], 2),
        ("log_histogram", "h", [0.0, 1.0], [3], 3),
    ]
    assert [sink.calls for sink in sinks] == [[*expected, ("close",)]] * 2


def test_all_sinks_are_closed_when_one_fails():
    sinks = [RecordingSink(fails=True), RecordingSink(fails=True), RecordingSink()]
    with pytest.raises(OSError, match="disk full"):
        Tracker(sinks).close()
    assert [sink.calls for sink in sinks] == [[("close",)]] * 3


@pytest.mark.parametrize("fails", [True, False])
def test_the_experiment_stays_open_when_the_files_are_closed(fails):
    class Experiment(RecordingSink):
        run_id = "abc"

    sink, experiment = RecordingSink(fails), Experiment()
    tracker = Tracker([sink], {"wandb": experiment})
    tracker.log({"a": 1.0}, step=1)
    with pytest.raises(OSError, match="disk full") if fails else nullcontext():
        tracker.close_files()
    assert (tracker.experiments, tracker.run_id) == ({"wandb": experiment}, "abc")
    assert experiment.calls == [("log", {"a": 1.0}, 1)]
    assert sink.calls[-1] == ("close",)


def open_named(loggers, folder):
    return open_tracker(TrainerConfig(logger=loggers), folder, {}, total_steps=2)


@pytest.mark.parametrize("loggers", [[], ["file"]])
def test_json_lines_are_written_once_whether_they_are_named_or_not(loggers, tmp_path):
    tracker = open_named(loggers, tmp_path)
    tracker.log({"a": 1.0}, step=1)
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n'
    assert tracker.run_id is None


def test_a_life_without_wandb_keeps_the_run_id_for_the_next_one(tmp_path):
    tracker = open_tracker(TrainerConfig(logger=[]), tmp_path, {}, total_steps=2, run_id="abc")
    tracker.close()
    assert tracker.run_id == "abc"


def test_tensorboard_that_is_not_installed_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install --editable '\.\[tensorboard\]'` in the clone"):
        open_named(["tensorboard"], tmp_path)


def test_wandb_and_torch_are_loaded_only_when_asked_for():
    code = (
        "import sys, verl_rc.metrics.sinks; sys.exit(bool({'wandb', 'torch', 'tensorboard'} & "
        "set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
