"""The console's line; JSON lines: strict, flushed, continued by a resumed run."""

import errno
import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from verl_rc.config.folder_owner import FolderLostError, FolderTakenError
from verl_rc.metrics.sinks import AlertCause, ConsoleSink, JsonlSink

STEP = {
    "critic/score/mean": 0.4375,
    "response_length/mean": 11.0,
    "actor/pg_loss": -0.0123,
    "actor/grad_norm": 0.412,
    "rollout_corr/rollout_is_eff_sample_size": 0.971,
    "sync/rollout_gap_mean": 0.0213,
    "perf/total_num_tokens": 5000.0,
    "timing_s/step": 2.5,
}


def lines_of(*steps, total_steps=55, **console):
    stream = io.StringIO()
    sink = ConsoleSink(total_steps, Console(file=stream, **console))
    for step, metrics in steps:
        sink.log(metrics, step)
    sink.close()
    return stream.getvalue().splitlines()


def test_one_line_a_step_with_the_numbers_people_watch():
    assert lines_of((12, STEP)) == [
        "step 12/55  reward 0.438  len 11.0  pg_loss -0.0123  grad 0.412  ESS 0.971  |gap| 0.021  2,000 "
        "tok/s  2.5 s  ETA 1m48s"
    ]


def test_numbers_that_are_absent_are_left_out_and_the_last_step_has_no_time_left():
    assert lines_of((55, {"timing_s/step": 1.0})) == ["step 55/55  1.0 s"]


def test_validation_accuracy_is_shown_and_step_zero_does_not_enter_the_time_left():
    metrics = {"val-core/digits/sort/acc/mean@1": 0.171875, "timing_s/step": 100.0}
    lines = lines_of((0, metrics), (1, {"timing_s/step": 2.0}))
    assert lines[0] == "step 0/55  val digits/sort acc 0.172  100.0 s"
    assert lines[1].endswith("ETA 1m48s")  # 54 steps of 2 s


def test_statistics_of_several_samples_keep_their_name():
    line = lines_of(
        (
            2,
            {
                "val-core/digits/acc/best@8/mean": 0.5,
                "val-core/digits/acc/mean@8": 0.25,
                "timing_s/step": 1.0,
            },
        )
    )[0]
    assert "val digits acc best@8/mean 0.500" in line
    assert "val digits acc mean@8 0.250" in line


def test_long_lines_are_not_wrapped_and_brackets_are_no_markup():
    metrics = {f"val-core/[bold]source{i}/acc/mean@1": 0.5 for i in range(9)}
    assert len(lines_of((1, metrics), width=40)) == 1
    assert "[bold]source8" in lines_of((1, metrics), width=40)[0]


def test_a_terminal_gets_a_bar_as_well():
    shown = "\n".join(lines_of((1, STEP), (2, STEP), force_terminal=True, width=200))
    assert "step 2/55" in shown
    assert "2/55" in shown.replace("step 2/55", "")


def test_names_and_alerts_have_no_codes_of_a_terminal():
    stream = io.StringIO()
    sink = ConsoleSink(55, Console(file=stream))
    sink.log({"val-core/a\x1b[2Jb/acc/mean@1": 0.5}, step=1)
    sink.alert("\u202eodd", "c\x07d\n", step=1)
    assert r"val a\x1b[2Jb acc" in stream.getvalue()
    assert stream.getvalue().endswith("warning: \\u202eodd: c\\x07d\n")


def test_an_alert_is_a_line_a_complaint():
    stream = io.StringIO()
    ConsoleSink(55, Console(file=stream)).alert("not healthy", "a = 1 [0 to 1]\nb = 2", step=3)
    assert stream.getvalue().splitlines() == [
        "warning: not healthy: a = 1 [0 to 1]",
        "warning: not healthy: b = 2",
    ]


def read(path):
    def refuse(text):
        raise ValueError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_line_is_there_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "run")
    sink.log({"actor/lr": 1e-5}, step=1)
    assert read(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "actor/lr": 1e-5}]  # not closed yet
    sink.log({"actor/lr": 2e-5}, step=2)
    sink.close()
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_numbers_that_are_not_finite_stay_readable(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1)
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert float(line["c"]) == -math.inf


def test_alerts_have_a_file_of_their_own_once_there_is_one(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log({"a": 1.0}, step=4)
    assert not (tmp_path / "alerts.jsonl").exists()
    sink.alert("title", "first\nsecond", step=5)
    assert read(tmp_path / "alerts.jsonl") == [{"step": 5, "title": "title", "text": "first\nsecond"}]


def test_alerts_of_known_causes_have_cause_and_evidence(tmp_path):
    cause = AlertCause("temperature", 3, {"temperature_slope": -0.111, "temperature_z": math.nan})
    JsonlSink(tmp_path).alert("gap: temperature", "cooler", step=5, cause=cause)
    (line,) = read(tmp_path / "alerts.jsonl")
    assert (line["cause"], line["since_step"]) == ("temperature", 3)
    assert line["evidence"] == {"temperature_slope": -0.111, "temperature_z": "NaN"}


def test_tables_and_histograms(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log_table("val/generations", ["input", "score"], [["3+4=", 1.0], ["5+5=", math.nan]], step=3)
    sink.log_histogram("rollout_corr/log_ratio", [-1.0, 0.0, 1.0], [5, 7], step=3)
    sink.log_histogram("rollout_corr/log_ratio", [-1.0, 0.0, 1.0], [0, 8], step=4)
    sink.log_histogram("other", [-1.0, 0.0, 1.0], [0, 0], step=4)
    sink.log_histogram("rollout_corr/log_ratio", [0.0, 1.0, 2.0], [1, 0], step=5)
    sink.close()
    assert read(tmp_path / "tables" / "val-generations.jsonl") == [
        {"step": 3, "input": "3+4=", "score": 1.0},
        {"step": 3, "input": "5+5=", "score": "NaN"},
    ]
    assert read(tmp_path / "histograms.jsonl") == [
        {"step": 3, "name": "rollout_corr/log_ratio", "edges": [-1.0, 0.0, 1.0], "bins": [[0, 5], [1, 7]]},
        {"step": 4, "name": "rollout_corr/log_ratio", "bins": [[1, 8]]},
        {"step": 4, "name": "other", "edges": [-1.0, 0.0, 1.0], "bins": []},
        {"step": 5, "name": "rollout_corr/log_ratio", "edges": [0.0, 1.0, 2.0], "bins": [[0, 1]]},
    ]


def test_a_row_must_have_a_cell_for_every_column(tmp_path):
    with pytest.raises(ValueError, match="zip"):
        JsonlSink(tmp_path).log_table("t", ["a", "b"], [[1]], step=1)


def write_run(folder, steps, run, steps_done=0):
    sink = JsonlSink(folder, steps_done)
    for step in steps:
        sink.log({"run": run}, step)
        if step % 2:
            sink.log_table("val", ["run"], [[run], [run]], step)
    sink.close()


def runs_by_step(path):
    return [(line["step"], line["run"]) for line in read(path)]


def test_a_resumed_run_replaces_the_steps_that_were_lost(tmp_path):
    write_run(tmp_path, [0, 1, 2, 3], run=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')  # killed here; the checkpoint was taken after step 2
    write_run(tmp_path, [3, 4], run=2, steps_done=2)
    assert runs_by_step(tmp_path / "metrics.jsonl") == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
    assert (tmp_path / "metrics.replaced.jsonl").read_text() == '{"step": 3, "run": 1}\n{"step": 4, "ru\n'
    assert runs_by_step(tmp_path / "tables/val.jsonl") == [(1, 1), (1, 1), (3, 2), (3, 2)]


def test_the_documents_name_the_files_of_a_run_as_they_are_written(tmp_path):
    for steps_done in (0, 1):  # the second life sets lines of the first aside
        sink = JsonlSink(tmp_path, steps_done)
        for step in (1, 2):
            sink.log({"run": 1}, step)
            sink.log_histogram("rollout_corr/log_ratio", [0.0, 1.0], [3], step)
            sink.log_table("val/generations", ["input"], [["1"]], step)
            sink.alert("title", "text", step)
        sink.close()
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")}
    page = (Path(__file__).parents[4] / "docs" / "running.md").read_text()
    named = set(re.findall(r"^\| `([^`]+\.jsonl)`", page, re.MULTILINE))
    assert named <= written
    assert {name for name in written if ".replaced." not in name} <= named


FILES = ("metrics.jsonl", "histograms.jsonl", "alerts.jsonl", "tables/val-generations.jsonl")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tail", ["é".encode()[:1], b'{"step": 1, "text": "\\ud8', b"\0" * 100])
def test_a_run_goes_on_behind_half_a_line_of_any_file(tmp_path, name, tail):
    (tmp_path / "tables").mkdir()
    (tmp_path / name).write_bytes(b'{"step": 1, "text": "whole"}\n' + tail)
    sink = JsonlSink(tmp_path, steps_done=1)
    sink.log({"a": 2.0}, step=2)
    sink.log_histogram("h", [0.0, 1.0], [1], step=2)
    sink.alert("title", "text", step=2)
    sink.log_table("val/generations", ["text"], [["é"]], step=2)
    sink.close()
    assert [line["step"] for line in read(tmp_path / name)] == [1, 2]


def test_half_a_surrogate_pair_in_a_table_is_written_as_json_writes_it(tmp_path):
    JsonlSink(tmp_path).log_table("t", ["text"], [["é\ud83d"]], step=1)
    written = (tmp_path / "tables" / "t.jsonl").read_text(encoding="utf-8")
    assert written == '{"step": 1, "text": "é\\ud83d"}\n'
    assert read(tmp_path / "tables" / "t.jsonl") == [{"step": 1, "text": "é\ud83d"}]


def test_a_validation_of_a_finished_step_joins_its_line(tmp_path):
    write_run(tmp_path, [0, 1, 2], run=1)
    write_run(tmp_path, [2], run=2, steps_done=2)  # trainer.val_only
    assert runs_by_step(tmp_path / "metrics.jsonl") == [(0, 1), (1, 1), (2, 1), (2, 2)]
    assert not (tmp_path / "metrics.replaced.jsonl").exists()


def test_what_was_lost_is_gone_before_the_first_line_and_several_lives_keep_theirs(tmp_path):
    write_run(tmp_path, [0, 1, 2, 3], run=1)
    JsonlSink(tmp_path, steps_done=2)
    JsonlSink(tmp_path, steps_done=1)
    assert runs_by_step(tmp_path / "metrics.jsonl") == [(0, 1), (1, 1)]
    assert runs_by_step(tmp_path / "metrics.replaced.jsonl") == [(3, 1), (2, 1)]
    assert not (tmp_path / "tables/val.replaced.replaced.jsonl").exists()


def test_a_new_run_in_the_same_folder_sets_the_old_one_aside(tmp_path):
    write_run(tmp_path, [0, 1], run=1)
    write_run(tmp_path, [0], run=2)
    assert runs_by_step(tmp_path / "metrics.jsonl") == [(0, 2)]
    assert runs_by_step(tmp_path / "metrics.replaced.jsonl") == [(0, 1), (1, 1)]


def test_a_crash_in_the_middle_of_it_loses_no_line(tmp_path, monkeypatch):
    write_run(tmp_path, [0, 1, 2], run=1)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            JsonlSink(tmp_path, steps_done=1)
    assert runs_by_step(tmp_path / "metrics.jsonl") == [(0, 1), (1, 1), (2, 1)]
    JsonlSink(tmp_path, steps_done=1)
    assert runs_by_step(tmp_path / "metrics.jsonl") == [(0, 1), (1, 1)]


def test_a_folder_has_one_open_sink(tmp_path):
    first = JsonlSink(tmp_path)
    first.log({"a": 1.0}, step=1)
    with pytest.raises(FolderTakenError):
        JsonlSink(tmp_path)
    first.log({"a": 2.0}, step=2)
    first.close()
    JsonlSink(tmp_path, steps_done=2).close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "owner.json").exists()


def test_a_sink_that_has_lost_its_folder_writes_nothing(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log({"a": 1.0}, step=1)
    (tmp_path / "owner.json").write_text("of another run")
    with pytest.raises(FolderLostError):
        sink.log({"a": 2.0}, step=2)
    sink.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "owner.json").read_text() == "of another run"


def test_only_the_first_line_that_does_not_fit_reports_a_full_disk(tmp_path):
    sink = JsonlSink(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        sink.log({"a": 1.0}, step=1)
    assert caught.value.errno == errno.ENOSPC
    sink.close()
