"""W&B, offline: a real run in a temporary folder, read back record by record; online or offline; tags of a
configuration."""

import json
import socket
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from planned_runs import config_of
from two_processes import free_port

from verl_rc.config.run import TrainerConfig
from verl_rc.metrics.sinks import FinalReport, open_tracker, wandb_sink
from verl_rc.metrics.sinks.wandb_sink import join_bins, run_tags, use_writable_folders

wandb = pytest.importorskip("wandb")

TRAINER = TrainerConfig(logger="wandb", project_name="project", experiment_name="experiment")
CONFIG = {
    "trainer": {"seed": 1},
    "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
}
_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7


def records_of(path):
    """The whole records of a ``.wandb`` file, a log in 32-KiB blocks: a record is in one piece (kind 1) or in
    several (2, 3, 4).

    W&B's process may still be writing: a piece whose end is not in the file yet ends the list.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = path.read_bytes(), _FILE_HEADER, []
    while position + _HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if len(content) < position + _HEADER + length:
            return
        parts.append(content[position + _HEADER : position + _HEADER + length])
        position += _HEADER + length
        if kind in (1, 4):
            yield Record.FromString(b"".join(parts))
            parts = []


def written(folder, run_id):
    """All records of a run that was closed, once W&B's own process has written the last one."""
    (run_folder,) = (folder / "wandb").glob("offline-run-*")
    assert run_folder.name.endswith(run_id)
    for _ in range(1200):
        records = list(records_of(run_folder / f"run-{run_id}.wandb"))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError("the run has no end: an upload would take it for one that still runs")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What a run of four steps, logged without credentials, wrote into its folder."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setattr(wandb, "login", lambda **_: False)
        tracker = open_tracker(TRAINER, folder, CONFIG, total_steps=4)
        for step, accuracy in enumerate([0.2, 0.6, 0.6, 0.4], 1):
            validation = {"val-core/digits/acc/mean@1": accuracy, "val-aux/digits/reward/mean@1": accuracy}
            tracker.log({"actor/lr": 0.5, **validation}, step=step)
        tracker.log_table("val/generations", ["input"], [["a"]], step=4)
        tracker.log_histogram("log_ratio", list(range(1002)), [1] * 1001, step=4)
        tracker.alert("title", "first\nsecond", step=4)
        tracker.close()
        return written(folder, tracker.run_id)


def of_kind(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def test_an_offline_run_has_project_name_tags_and_the_whole_configuration(records):
    run = of_kind(records, "run")[0]
    assert (run.project, run.display_name) == ("project", "experiment")
    assert set(run.tags) == {"grpo", "decoupled", "is-token"}
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["algorithm"] == CONFIG["algorithm"]
    assert config["trainer"] == CONFIG["trainer"]


def test_metrics_tables_histograms_and_alerts_are_in_it(records):
    items = [item for history in of_kind(records, "history") for item in history.item]
    assert {"actor/lr", "val/generations", "log_ratio"} <= {
        item.nested_key[0] if item.nested_key else item.key for item in items
    }
    (alert,) = of_kind(records, "alert")
    assert (alert.title, alert.text, alert.level) == ("title", "step 4\nfirst\nsecond", "WARN")


def test_the_summary_keeps_the_best_validation_and_its_step(records):
    updates = [item for summary in of_kind(records, "summary") for item in summary.update]
    summary = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}
    assert summary["best/digits/acc/mean@1"] == 0.6
    assert summary["best/digits/acc/mean@1/step"] == 2
    assert not [name for name in summary if name.startswith("best/") and "reward" in name]


def test_the_report_and_the_end_are_written_after_all_other_files_are_closed(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    tracker = open_tracker(TRAINER, tmp_path, CONFIG, total_steps=4)
    tracker.log({"actor/lr": 0.5}, step=4)
    tracker.close_files()
    page = (
        "<!doctype html><meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\"><p>a page"
    )
    tracker.experiments["wandb"].publish(FinalReport("all is\nwell", "good", page))
    tracker.experiments["wandb"].finish(143)
    records = written(tmp_path, tracker.run_id)
    assert records[-1].exit.exit_code == 143
    updates = [item for summary in of_kind(records, "summary") for item in summary.update]
    summary = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}
    assert (summary["verdict"], summary["verdict_code"]) == ("all is\nwell", "good")
    (row,) = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        for history in of_kind(records, "history")
    ]
    assert (row["_step"], row["actor/lr"]) == (4, 0.5)
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*/files/{row['report/path']}")
    assert file.read_text() == page


@pytest.fixture
def server(monkeypatch):
    """Something that accepts connections in the place of W&B."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def answering_at(monkeypatch, port):
    settings = SimpleNamespace(base_url=f"http://127.0.0.1:{port}")
    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=settings))


def test_credentials_without_a_network_are_an_offline_run_that_says_how_to_upload(
    server, monkeypatch, caplog
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    answering_at(monkeypatch, free_port())
    assert wandb_sink.goes_offline()
    assert "nothing answers at 127.0.0.1" in caplog.text
    assert "wandb sync" in caplog.text


def test_a_network_behind_a_proxy_is_one(server, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    answering_at(monkeypatch, free_port())
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{server}")
    assert not wandb_sink.goes_offline()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert wandb_sink.goes_offline()


def test_what_w_and_b_refuses_is_one_sentence(server, tmp_path, monkeypatch):
    def refuse(**_):
        raise wandb.errors.CommError("user is not logged in")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    answering_at(monkeypatch, server)
    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"user is not logged in.*WANDB_MODE=offline"):
        open_tracker(TRAINER, tmp_path, {}, total_steps=1)


@pytest.mark.parametrize(
    ("variable", "logged_in", "mode"),
    [
        (None, False, "offline"),
        (None, True, None),
        ("online", False, "offline"),
        ("online", True, None),
        ("disabled", False, None),
        ("shared", True, None),
    ],
)
def test_offline_only_without_credentials_and_without_the_users_choice(
    server, tmp_path, monkeypatch, variable, logged_in, mode
):
    answering_at(monkeypatch, server)
    seen = {}
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setattr(wandb, "login", lambda **_: logged_in)
    monkeypatch.setattr(
        wandb, "init", lambda **options: seen.update(options) or type("Run", (), {"id": options["id"]})
    )
    tracker = open_tracker(TRAINER, tmp_path, {"a": 1}, total_steps=1, run_id="abc123")
    assert seen["mode"] == mode
    assert (seen["project"], seen["name"], seen["config"]) == ("project", "experiment", {"a": 1})
    assert (seen["id"], seen["resume"], tracker.run_id) == ("abc123", "allow", "abc123")


def test_a_resumed_run_goes_on_from_its_best(server, tmp_path, monkeypatch):
    answering_at(monkeypatch, server)
    summary = {"best/digits/acc/mean@1": 0.7, "best/digits/acc/mean@1/step": 20}
    run = type("Run", (), {"id": "abc", "summary": summary, "log": lambda *_, **__: None})
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", lambda **_: run())
    tracker = open_tracker(TRAINER, tmp_path, {}, total_steps=1, run_id="abc")
    tracker.log({"val-core/digits/acc/mean@1": 0.65}, step=21)
    assert summary["best/digits/acc/mean@1/step"] == 20
    tracker.log({"val-core/digits/acc/mean@1": 0.75}, step=30)
    assert summary == {"best/digits/acc/mean@1": 0.75, "best/digits/acc/mean@1/step": 30}


def test_joining_bins_keeps_the_counts_and_the_ends():
    edges, counts = join_bins([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1, 2, 3, 4, 5], max_bins=2)
    assert (edges, counts) == ([0.0, 3.0, 5.0], [6, 9])
    assert join_bins([0.0, 1.0], [7], max_bins=512) == ([0.0, 1.0], [7])


@pytest.mark.parametrize("usable", [True, False])
def test_folders_that_wandb_cannot_write_to_are_replaced_by_some_in_the_run(tmp_path, monkeypatch, usable):
    (tmp_path / "file").touch()
    home, run = tmp_path / ("home" if usable else "file"), tmp_path / "run"
    for variable, name in (("WANDB_CACHE_DIR", "cache"), ("WANDB_DATA_DIR", "data")):
        monkeypatch.setenv(variable, str(home / name))
    use_writable_folders(run)
    found = {Path(wandb.env.get_cache_dir()), Path(wandb.env.get_data_dir())}
    own = {run / "wandb" / "wandb_cache_dir", run / "wandb" / "wandb_data_dir"}
    assert found == ({home / "cache", home / "data"} if usable else own)


def test_a_run_with_tables_needs_no_home_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "file" / "own"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    tracker = open_tracker(TRAINER, tmp_path / "run", CONFIG, total_steps=1)
    tracker.log_table("val/generations", ["input"], [["a"]], step=1)
    tracker.close()
    assert any(
        record.WhichOneof("record_type") == "history" for record in written(tmp_path / "run", tracker.run_id)
    )


CORRECTION = "algorithm.rollout_correction"


def tags_of(given):
    return run_tags(config_of(given).model_dump(mode="json"))


def test_a_plain_run_names_estimator_loss_and_that_nothing_is_corrected():
    assert {"grpo", "ppo-clip", "decoupled", "uncorrected"} <= set(tags_of({}))


@pytest.mark.parametrize(
    ("given", "present", "absent"),
    [
        ({f"{CORRECTION}.rollout_is": "sequence"}, {"decoupled", "is-sequence"}, {"uncorrected", "bypass"}),
        ({f"{CORRECTION}.bypass_mode": True}, {"bypass"}, {"decoupled", "uncorrected"}),
        (
            {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"},
            {"bypass", "reinforce", "uncorrected"},
            {"ppo-clip"},
        ),
        (
            {
                f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k2",
                f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0,1.0",
            },
            {"rs-token_k1", "rs-seq_max_k2"},
            {"uncorrected"},
        ),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, {"gspo"}, {"ppo-clip"}),
        (
            {"actor_rollout_ref.rollout.quantization": "fp8_per_channel"},
            {"engine-fp8_per_channel"},
            {"engine-bfloat16"},
        ),
        ({"actor_rollout_ref.rollout.kv_cache_dtype": "fp8"}, {"kv-cache-fp8", "engine-bfloat16"}, set()),
        ({"actor_rollout_ref.model.lora_rank": 8}, {"lora-8"}, set()),
        ({"algorithm.filter_groups.enable": True}, {"dynamic-sampling"}, set()),
        ({"actor_rollout_ref.model.path": "models/Qwen2.5-7B"}, {"Qwen2.5-7B"}, {"models/Qwen2.5-7B"}),
    ],
)
def test_what_a_run_is_about_becomes_a_tag(given, present, absent):
    tags = set(tags_of(given))
    assert present <= tags
    assert not absent & tags


def test_tags_are_short_enough_for_wandb_and_there_once():
    tags = run_tags(
        {"actor_rollout_ref": {"model": {"path": "m" * 100}}, "algorithm": {"adv_estimator": "m" * 80}}
    )
    assert tags == ["m" * 64]


def test_a_run_without_these_sections_has_no_tags():
    assert run_tags({"model": {"path": "x"}, "trainer": {"seed": 1}}) == []
