"""JSON lines: strict, flushed, continued by a resumed run."""

import json
import math

import pytest

from verl_rc.metrics.sinks import JsonlSink


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


def test_tables_and_histograms(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log_table("val/generations", ["input", "score"], [["3+4=", 1.0], ["5+5=", math.nan]], step=3)
    sink.log_histogram("rollout_corr/log_ratio", [-1.0, 0.0, 1.0], [5, 7], step=3)
    sink.close()
    assert read(tmp_path / "tables" / "val-generations.jsonl") == [
        {"step": 3, "input": "3+4=", "score": 1.0},
        {"step": 3, "input": "5+5=", "score": "NaN"},
    ]
    assert read(tmp_path / "histograms.jsonl") == [
        {"step": 3, "name": "rollout_corr/log_ratio", "edges": [-1.0, 0.0, 1.0], "counts": [5, 7]}
    ]


def test_a_row_must_have_a_cell_for_every_column(tmp_path):
    with pytest.raises(ValueError, match="zip"):
        JsonlSink(tmp_path).log_table("t", ["a", "b"], [[1]], step=1)


def write_run(folder, steps, run):
    sink = JsonlSink(folder)
    for step in steps:
        sink.log({"run": run}, step)
    sink.close()


def test_a_resumed_run_replaces_the_steps_that_were_lost(tmp_path):
    write_run(tmp_path, [0, 1, 2, 3], run=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')  # killed here
    write_run(tmp_path, [2, 3], run=2)  # the checkpoint was taken after step 2
    lines = [(line["step"], line["run"]) for line in read(tmp_path / "metrics.jsonl")]
    assert lines == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2)]
    assert (tmp_path / "metrics.before_step_2.jsonl").read_text().endswith('"ru')


def test_a_new_run_in_the_same_folder_sets_the_old_one_aside(tmp_path):
    write_run(tmp_path, [0, 1], run=1)
    write_run(tmp_path, [0], run=2)
    assert [line["run"] for line in read(tmp_path / "metrics.jsonl")] == [2]
    assert len(read(tmp_path / "metrics.before_step_0.jsonl")) == 2
