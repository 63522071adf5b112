"""W&B, offline: a real run in a temporary folder, and the choice between online and offline."""

import pytest

from verl_rc.metrics.sinks import open_tracker
from verl_rc.metrics.sinks.wandb_sink import join_bins

wandb = pytest.importorskip("wandb")


def test_without_credentials_a_run_is_written_offline_into_the_run_folder(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    tracker = open_tracker(["wandb"], "project", "experiment", tmp_path, {"trainer": {"seed": 1}}, total_steps=1)
    tracker.log({"actor/lr": 0.5}, step=1)
    tracker.log_table("val/generations", ["input"], [["a"]], step=1)
    tracker.log_histogram("log_ratio", list(range(1002)), [1] * 1001, step=1)
    tracker.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(tracker.run_id)
    assert (folder / f"run-{tracker.run_id}.wandb").stat().st_size > 0


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


def test_joining_bins_keeps_the_counts_and_the_ends():
    edges, counts = join_bins([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1, 2, 3, 4, 5], max_bins=2)
    assert (edges, counts) == ([0.0, 3.0, 5.0], [6, 9])
    assert join_bins([0.0, 1.0], [7], max_bins=512) == ([0.0, 1.0], [7])
