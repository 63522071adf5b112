"""MLflow, SwanLab and Trackio, offline: a run in a temporary folder, continued by a second life, read back
with each package's own reader."""

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

import pytest
from built_wheel import Environment
from small_runs import HELPERS, ROOT

from verl_rc.config.errors import ConfigError
from verl_rc.config.run import TrainerConfig
from verl_rc.metrics.sinks import FinalReport, open_tracker, require_installed

PACKAGES = ("mlflow", "swanlab", "trackio")
TRAINER = {"project_name": "project", "experiment_name": "experiment"}
CONFIG = {"trainer": {"seed": 7}, "algorithm": {"adv_estimator": "grpo"}}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the slow test of this file installs it elsewhere")


def write(logger: str, folder: Path) -> str:
    """Two lives of one run; returns its id."""
    trainer = TrainerConfig(logger=[logger], **TRAINER)
    for steps_done, values in ((0, (0.5, float("nan"))), (2, (0.25,))):
        tracker = open_tracker(trainer, folder, CONFIG, total_steps=3, steps_done=steps_done)
        for step, value in enumerate(values, steps_done + 1):
            tracker.log({"actor/lr": value, "val-core/digits/acc/mean@1": 1.0}, step)
        if steps_done == 0:
            tracker.log_table("val/generations", ["input", "score"], [["a|b", 1.0], ["c", None]], 2)
        tracker.log_histogram("log_ratio", [-1.0, 0.0, 1.0], [3, 1], 2)
        tracker.alert("title", "text", 2)
        experiment = tracker.experiments[logger]
        tracker.close_files()
        experiment.publish(FinalReport("all is well", "ok", "<!doctype html><p>page"))
        experiment.finish(1 if steps_done else 0)
    return experiment.run_id


def test_mlflow_has_metrics_parameters_table_and_verdict_of_a_run_in_two_lives(tmp_path, monkeypatch):
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    run_id = write("mlflow", tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "experiment", "FAILED")
    assert run.data.params == {"trainer.seed": "7", "algorithm.adv_estimator": "grpo"}
    lr = {point.step: point.value for point in client.get_metric_history(run_id, "actor/lr")}
    assert (lr[1], lr[3]) == (0.5, 0.25)
    assert lr[2] != lr[2]
    assert [p.step for p in client.get_metric_history(run_id, "val-core/digits/acc/mean_at_1")] == [1, 2, 3]
    assert run.data.tags["alert"] == "step 2: title\ntext"
    assert (run.data.tags["verdict"], run.data.tags["verdict_code"]) == ("all is well", "ok")
    folder = Path(client.download_artifacts(run_id, "", str(tmp_path / "artifacts")))
    assert (folder / "report.html").read_text() == "<!doctype html><p>page"
    table = json.loads((folder / "val" / "generations" / "2.json").read_text())
    assert table == {"columns": ["input", "score"], "data": [["a|b", 1.0], ["c", None]]}


def test_a_server_of_mlflow_that_fails_ends_no_run(tmp_path, monkeypatch, caplog):
    needs("mlflow")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    trainer = TrainerConfig(logger=["mlflow"], **TRAINER)
    tracker = open_tracker(trainer, tmp_path, CONFIG, total_steps=1)

    def fail(*_: object, **__: object) -> None:
        raise MlflowException("no server")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", fail)
        tracker.log({"a": 1.0}, 1)
    assert "MLflow did not take step 1: no server" in caplog.text
    tracker.close()
    monkeypatch.setattr(MlflowClient, "create_run", fail)
    with pytest.raises(
        ValueError, match=r"^trainer\.logger: MLflow must take the run, but: no server\. Set MLF"
    ):
        open_tracker(trainer, tmp_path, CONFIG, total_steps=1)


def test_trackio_has_metrics_configuration_table_and_alerts_of_a_run_in_two_lives(tmp_path, monkeypatch):
    needs("trackio")
    import trackio
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):  # read from TRACKIO_DIR when they are imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    assert write("trackio", tmp_path) == "experiment"
    (run,) = trackio.Api().runs("project")
    assert run.name == "experiment"
    assert run.config["trainer"] == {"seed": 7}
    assert {alert["title"] for alert in run.alerts()} == {"title", "ok"}
    logged = sqlite_storage.SQLiteStorage.get_logs("project", "experiment")
    lr = {line["step"]: line["actor/lr"] for line in logged if "actor/lr" in line}
    assert (sorted(lr), lr[1], lr[3]) == ([1, 2, 3], 0.5, 0.25)
    (table,) = [line["val/generations"] for line in logged if "val/generations" in line]
    assert table["_value"] == [{"input": "a|b", "score": 1.0}, {"input": "c", "score": None}]


def test_swanlab_has_metrics_table_and_page_of_an_offline_run(tmp_path, monkeypatch):
    needs("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "swan"))
    run_id = write("swanlab", tmp_path)
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    lr, media = {}, set()
    folders = sorted((tmp_path / "swan").glob(f"run-*-{run_id}"))
    assert folders
    for folder in folders:
        reader = DataStoreReader()
        reader.open(folder / f"run-{run_id}.swanlab")
        for content in reader:
            record = Record.FromString(content)
            if record.HasField("scalar") and record.scalar.key == "actor/lr":
                lr[record.scalar.step] = record.scalar.value.number
            if record.HasField("media"):
                media.add(record.media.key)
    assert (lr[1], lr[3]) == (0.5, 0.25)
    assert media == {"val/generations", "alerts", "verdict", "report"}


def test_swanlab_without_a_key_says_what_to_do(tmp_path, monkeypatch):
    needs("swanlab")
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("SWANLAB_MODE", "online")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"^trainer\.logger: SwanLab must take the run.*SWANLAB_MODE=offline"
    ):
        open_tracker(TrainerConfig(logger=["swanlab"], **TRAINER), tmp_path, CONFIG, total_steps=1)


def test_packages_that_are_not_installed_are_named_with_the_command(monkeypatch):
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    command = r"python -m pip install --editable '\.\[mlflow,trackio\]'` in the clone"
    with pytest.raises(ConfigError, match=rf"^trainer\.logger: mlflow, trackio must be installed.*{command}"):
        require_installed(["console", "mlflow", "trackio"])
    require_installed(["console", "wandb", "file"])


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_newest_release_of_a_package_takes_a_run(package, tmp_path):
    """In an environment of its own, because it may want other versions of what is here."""
    try:
        own = Environment(tmp_path, [f"{package}"])
    except AssertionError as error:
        pytest.skip(f"{package} cannot be installed here: {error}")
    here = Path(own.run("-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (here / "zz_ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", f"test_{package}"]
    program = f"import sys; sys.path[:0] = {[str(ROOT), *HELPERS.split(':')]!r}"
    (here / "zz_tree.pth").write_text(program + "\n")
    said = own.run(*command)
    assert "passed" in said
    assert "skipped" not in said
