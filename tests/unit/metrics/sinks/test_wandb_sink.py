"""W&B, offline: a real run in a temporary folder, read back record by record, and the choice between online and offline."""

import json
import struct

import pytest

from verl_rc.metrics.sinks import open_tracker
from verl_rc.metrics.sinks.wandb_sink import join_bins

wandb = pytest.importorskip("wandb")

CONFIG = {"trainer": {"seed": 1}, "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}}}
_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7


def records_of(path):
    """The records of a ``.wandb`` file: a log in blocks of 32 KiB; a record is whole (kind 1) or in parts (2, 3, and 4 the last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = path.read_bytes(), _FILE_HEADER, []
    while position + _HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + _HEADER : position + _HEADER + length])
        position += _HEADER + length
        if kind in (1, 4):
            yield Record.FromString(b"".join(parts))
            parts = []


@pytest.fixture
def offline(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: False)


def run_file(tmp_path, tracker):
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(tracker.run_id)
    return folder / f"run-{tracker.run_id}.wandb"


def test_an_offline_run_in_the_run_folder_holds_all_that_wandb_sync_uploads(tmp_path, offline):
    tracker = open_tracker(["wandb"], "project", "experiment", tmp_path, CONFIG, total_steps=3)
    for step, accuracy in enumerate([0.2, 0.6, 0.4], 1):
        tracker.log({"actor/lr": 0.5, "val-core/digits/acc/mean@1": accuracy}, step=step)
    tracker.log_table("val/generations", ["input"], [["a"]], step=3)
    tracker.log_histogram("log_ratio", list(range(1002)), [1] * 1001, step=3)
    tracker.alert("title", "first\nsecond", step=3)
    tracker.close()

    records = list(records_of(run_file(tmp_path, tracker)))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert "exit" in kinds  # complete: an upload takes it for a finished run
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name) == ("project", "experiment")
    assert {"grpo", "decoupled", "is-token"} == set(run.tags)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["algorithm"] == CONFIG["algorithm"]
    history = [item for record in records for item in record.history.item]
    logged = {item.nested_key[0] if item.nested_key else item.key for item in history}
    assert {"actor/lr", "val/generations", "log_ratio"} <= logged
    (alert,) = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.text, alert.level) == ("title", "step 3\nfirst\nsecond", "WARN")


def test_the_summary_keeps_the_best_validation_and_its_step(tmp_path, offline):
    tracker = open_tracker(["wandb"], "project", "experiment", tmp_path, CONFIG, total_steps=4)
    for step, accuracy in enumerate([0.2, 0.6, 0.6, 0.4], 1):
        tracker.log({"val-core/digits/acc/mean@1": accuracy, "val-aux/digits/reward/mean@1": accuracy}, step=step)
    tracker.close()
    summary = {}
    for record in records_of(run_file(tmp_path, tracker)):
        for item in record.summary.update:
            summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    assert summary["best/digits/acc/mean@1"] == 0.6
    assert summary["best/digits/acc/mean@1/step"] == 2
    assert not [name for name in summary if name.startswith("best/") and "reward" in name]


@pytest.mark.parametrize(
    ("variable", "logged_in", "mode"), [(None, False, "offline"), (None, True, None), ("online", False, None)]
)
def test_offline_only_when_the_user_neither_logged_in_nor_chose(tmp_path, monkeypatch, variable, logged_in, mode):
    seen = {}
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setattr(wandb, "login", lambda **_: logged_in)
    monkeypatch.setattr(wandb, "init", lambda **options: seen.update(options) or type("Run", (), {"id": options["id"]}))
    tracker = open_tracker(["wandb"], "project", "experiment", tmp_path, {"a": 1}, total_steps=1, resume_id="abc123")
    assert seen["mode"] == mode
    assert (seen["project"], seen["name"], seen["config"]) == ("project", "experiment", {"a": 1})
    assert (seen["id"], seen["resume"], tracker.run_id) == ("abc123", "allow", "abc123")


def test_a_resumed_run_goes_on_from_its_best(tmp_path, monkeypatch):
    summary = {"best/digits/acc/mean@1": 0.7, "best/digits/acc/mean@1/step": 20}
    run = type("Run", (), {"id": "abc", "summary": summary, "log": lambda *_, **__: None})
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", lambda **_: run())
    tracker = open_tracker(["wandb"], "project", "experiment", tmp_path, {}, total_steps=1, resume_id="abc")
    tracker.log({"val-core/digits/acc/mean@1": 0.65}, step=21)
    assert summary["best/digits/acc/mean@1/step"] == 20
    tracker.log({"val-core/digits/acc/mean@1": 0.75}, step=30)
    assert summary == {"best/digits/acc/mean@1": 0.75, "best/digits/acc/mean@1/step": 30}


def test_joining_bins_keeps_the_counts_and_the_ends():
    edges, counts = join_bins([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1, 2, 3, 4, 5], max_bins=2)
    assert (edges, counts) == ([0.0, 3.0, 5.0], [6, 9])
    assert join_bins([0.0, 1.0], [7], max_bins=512) == ([0.0, 1.0], [7])
