"""Every run leaves its page, whatever ended it; and a page that fails changes nothing about the run."""

import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from planted_series import healthy, write_run

from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.insight.run_folder import read_run
from verl_rc.trainer import report_at_end as module
from verl_rc.trainer.report_at_end import report_at_end

VERDICT = {"headline": "", "lines": ["all is well"], "code": "good"}
WRITTEN = SimpleNamespace(
    returncode=0,
    stdout=json.dumps({"report": "report.html", "run": "run", "verdict": VERDICT}),
    stderr="",
)


def trainer_of(folder, report: str = "at_end", wandb_text: bool = False):
    return SimpleNamespace(default_local_dir=str(folder), report=report, wandb_text=wandb_text)


class PlannedError(RuntimeError):
    """What ends a run."""


ENDINGS = [
    (None, 0, "all done"),
    (SystemExit(143), 143, "SIGTERM"),
    (SystemExit(0), 0, "all done"),
    (SystemExit(), 0, "all done"),
    (SystemExit("text"), 1, "the process ended itself"),
    (KeyboardInterrupt(), 130, "Ctrl-C"),
    (PlannedError("two\nlines"), 1, "PlannedError: two lines"),
    (ConfigError("data.x must be y"), 2, "ConfigError: data.x must be y"),
]


def end(folder, error, **further) -> BaseException | None:
    """What comes out of a run that ends with ``error``."""
    try:
        with report_at_end(trainer_of(folder, **further)):
            if error is not None:
                raise error
    except BaseException as came:  # noqa: BLE001  (Ctrl-C and exits are what is tested)
        return came
    return None


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="verl_rc")
    logging.getLogger("verl_rc").propagate = True
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [*ENDINGS[:2], *(pytest.param(*ending, marks=pytest.mark.slow) for ending in ENDINGS[2:])],
)
def test_how_it_ended_is_kept_and_goes_on(tmp_path, monkeypatch, error, status, reason):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: WRITTEN)
    folder = write_run(tmp_path / "run", healthy(steps=3))
    assert end(folder, error) is error
    ending = read_run(folder).ending
    assert ending is not None
    assert (ending.status, ending.reason) == (status, reason)


def test_the_page_of_a_run_that_was_stopped(tmp_path, said):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    assert isinstance(end(folder, SystemExit(143)), SystemExit)
    page = (folder / "report.html").read_text()
    assert "The run ended after 3 of 3 steps with exit code 143: SIGTERM." in page
    assert said()[-1] == f"report: {folder / 'report.html'}"


def test_a_run_that_was_never_set_up_says_one_thing(tmp_path, said):
    (tmp_path / "run").mkdir()
    error = PlannedError("no memory")
    assert end(tmp_path / "run", error) is error
    assert [line for line in said() if line.startswith("report: not written (")] == said()
    assert len(said()) == 1


def test_without_a_folder_nothing_is_said(tmp_path, said):
    assert end(tmp_path / "none", None) is None
    assert said() == []


def test_never(tmp_path):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    assert end(folder, None, report="never") is None
    assert not (folder / "report.html").exists()


FAILURES = [
    OSError("no process can be started"),
    subprocess.TimeoutExpired("report", 60.0),
    KeyboardInterrupt(),
    SimpleNamespace(returncode=2, stdout="", stderr="verl-rc report: disk full\n"),
    SimpleNamespace(returncode=-9, stdout="", stderr=""),
]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("error", [None, SystemExit(143), PlannedError("x")])
def test_a_page_that_fails_changes_nothing(tmp_path, monkeypatch, said, failure, error):
    def run(*_, **__):
        if isinstance(failure, BaseException):
            raise failure
        return failure

    monkeypatch.setattr(subprocess, "run", run)
    folder = write_run(tmp_path / "run", healthy(steps=3))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert end(folder, error) is error
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert len(said()) == 1
    assert said()[0].startswith("report: not written")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_folder_that_another_run_has_taken_over_gets_no_page(tmp_path, error):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    with FolderClaim(folder, "run"):
        (folder / "owner.json").write_text("of another run")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert end(folder, error) is error
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written_to_changes_nothing(tmp_path, said):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    (folder / "ending.json").mkdir()
    (folder / "ending.json" / "x").mkdir()
    assert end(folder, None) is None
    assert len(said()) == 1
    assert said()[0].startswith("report: not written (")


def test_a_page_may_take_a_minute(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(subprocess, "run", lambda *_, timeout, **__: limits.append(timeout) or WRITTEN)
    end(write_run(tmp_path / "run", healthy(steps=3)), None)
    assert limits == [60.0]
    assert module.ENDING == "ending.json"


def test_an_earlier_life_is_forgotten_when_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: WRITTEN)
    folder = write_run(tmp_path / "run", healthy(steps=3))
    (folder / "ending.json").write_text(json.dumps({"status": 143, "reason": "SIGTERM"}))
    with report_at_end(trainer_of(folder)):
        assert read_run(folder).ending is None


class KeptExperiment:
    """An experiment that notes what it is told."""

    run_id = "abc"

    def __init__(self, fails: bool = False) -> None:
        self.calls, self.fails = [], fails

    def publish(self, report) -> None:
        self.calls.append(report)
        if self.fails:
            raise RuntimeError("no network")

    def finish(self, exit_status: int) -> None:
        self.calls.append(exit_status)


def end_with(experiment, folder, error, **further) -> BaseException | None:
    """What comes out of a run with an experiment and a last line of metrics that is written when its files
    are closed."""

    class Tracker:
        def close_files(self) -> None:
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            last = json.loads(lines[-1]) | {"step": len(lines)}
            (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(last)]) + "\n")

    Tracker.experiments = {"wandb": experiment}
    try:
        with report_at_end(trainer_of(folder, **further)) as ending:
            try:
                if error is not None:
                    raise error
            finally:
                ending.close(Tracker())
    except BaseException as came:  # noqa: BLE001  (Ctrl-C and exits are what is tested)
        return came
    return None


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [*ENDINGS[:2], *(pytest.param(*ending, marks=pytest.mark.slow) for ending in ENDINGS[2:])],
)
def test_an_experiment_gets_verdict_and_page_of_all_steps_and_then_ends(tmp_path, error, status, reason):
    folder, experiment = write_run(tmp_path / "run", healthy(steps=3)), KeptExperiment()
    assert end_with(experiment, folder, error) is error
    report, ended = experiment.calls
    assert ended == status
    assert f"ended after {len((folder / 'metrics.jsonl').read_text().splitlines()) - 1} of" in report.verdict
    assert (reason in report.verdict) == (status != 0)
    assert report.page.startswith("<!doctype html>")


@pytest.mark.parametrize("with_text", [True, False])
def test_prompts_and_responses_are_in_the_experiments_page_only_where_that_is_asked_for(tmp_path, with_text):
    folder, experiment = write_run(tmp_path / "run", healthy(steps=3)), KeptExperiment()
    (folder / "tables").mkdir(exist_ok=True)
    sample = {"step": 3, "input": "a private prompt", "output": "an answer", "ground_truth": "", "score": 1.0}
    (folder / "tables" / "val-generations.jsonl").write_text(json.dumps(sample) + "\n")
    end_with(experiment, folder, None, wandb_text=with_text)
    assert "a private prompt" in (folder / "report.html").read_text()
    assert ("a private prompt" in experiment.calls[0].page) == with_text


def test_an_experiment_without_a_report_ends_too(tmp_path):
    folder, experiment = write_run(tmp_path / "run", healthy(steps=3)), KeptExperiment()
    end_with(experiment, folder, SystemExit(143), report="never")
    assert experiment.calls == [143]


def test_a_report_that_cannot_be_handed_over_changes_nothing(tmp_path, said):
    folder, experiment = write_run(tmp_path / "run", healthy(steps=3)), KeptExperiment(fails=True)
    assert end_with(experiment, folder, None) is None
    assert experiment.calls[1:] == [0]
    assert said()[-1] == "report: not handed to wandb (RuntimeError: no network)"


def test_curves_are_drawn_by_another_process(tmp_path):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    assert module.draw_curves(folder) == str(folder / "training_curves.png")


def test_a_run_goes_on_when_its_curves_cannot_be_drawn(tmp_path):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    (folder / "training_curves.png").mkdir()
    line = module.draw_curves(folder)
    assert line.startswith("not drawn (")
    assert "Is a directory" in line
    assert "\n" not in line


def test_the_loop_loads_nothing_of_insight():
    loaded = "any(name.startswith('verl_rc.insight') for name in sys.modules)"
    code = f"import sys, verl_rc.trainer.train; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
