"""A run's folder is read whole, half, resumed, damaged or not at all; nothing is counted twice and nothing is
invented."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from planted_series import healthy, write_run
from recorded_tokens import token_record, write_tokens

from verl_rc.insight.run_folder import NothingToReadError, read_run
from verl_rc.insight.run_folder.histograms import LOG_RATIO
from verl_rc.insight.verdict import verdict_of
from verl_rc.metrics.sinks.local import JsonlSink

SCORE = "critic/score/mean"


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in records))
    return path


def run_of(folder: Path, *records: object):
    lines(folder / "metrics.jsonl", *records)
    return read_run(folder)


def said(run, text: str) -> bool:
    return any(text in note for note in run.notes)


def test_a_finished_run(tmp_path):
    run = read_run(
        write_run(tmp_path / "one", healthy(steps=5), [{"input": "1+1", "output": "2", "score": 1.0}])
    )
    assert run.name == "one"
    assert list(run.steps) == [1, 2, 3, 4, 5]
    assert list(run.get(SCORE).values) == healthy(steps=5)[SCORE]
    assert run.total_steps == 5
    assert run.settings["algorithm.rollout_correction.rollout_is"] == "token"
    assert [(sample.step, sample.cells["output"]) for sample in run.samples] == [(5, "2")]
    assert run.ending is None


def test_the_words_for_numbers_that_are_not_finite(tmp_path):
    sink = JsonlSink(tmp_path)
    for step, value in enumerate((1.0, math.nan, math.inf, -math.inf, 2.0), start=1):
        sink.log({SCORE: value}, step)
    sink.close()
    run = read_run(tmp_path)
    assert [math.isfinite(value) for value in run.series[SCORE].values] == [True, False, False, False, True]
    assert list(run.get(SCORE).steps) == [1, 5]


def test_half_a_last_line_is_left_out_and_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/lr": 1.0}\n{"step": 2, "actor/lr": 1')
    run = read_run(tmp_path)
    assert list(run.steps) == [1]
    assert said(run, "half written")


def test_a_last_line_that_lacks_only_its_end_is_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/lr": 1.0}\n{"step": 2, "actor/lr": 3.5}')
    assert list(read_run(tmp_path).get("actor/lr").values) == [1.0, 3.5]


def test_a_step_logged_twice_counts_once_and_the_later_value_wins(tmp_path):
    run = run_of(
        tmp_path,
        {"step": 1, "actor/lr": 1},
        {"step": 2, "actor/lr": 2, "actor/grad_norm": 7},
        {"step": 2, "actor/lr": 3},
        {"step": 3, "actor/lr": 4},
    )
    assert list(run.steps) == [1, 2, 3]
    assert list(run.get("actor/lr").values) == [1, 3, 4]
    assert list(run.get("actor/grad_norm").values) == [7]
    assert said(run, "1 line(s) repeat a step")


def test_a_later_life_wins_from_its_first_step_on(tmp_path):
    first = [{"step": step, "actor/lr": float(step)} for step in range(1, 8)]
    second = [{"step": step, "actor/lr": -float(step)} for step in (5, 6)]
    run = run_of(tmp_path, *first, *second)
    assert list(run.steps) == [1, 2, 3, 4, 5, 6]
    assert list(run.get("actor/lr").values) == [1, 2, 3, 4, -5, -6]
    assert said(run, "went on at step 5 after it had reached 7")


def test_a_resumed_run_as_its_sink_leaves_it(tmp_path):
    for life, (done, steps) in enumerate(((0, range(1, 8)), (4, range(5, 7)))):
        sink = JsonlSink(tmp_path, done)
        for step in steps:
            sink.log({SCORE: float(life)}, step)
        sink.close()
    run = read_run(tmp_path)
    assert list(run.get(SCORE).values) == [0, 0, 0, 0, 1, 1]
    assert said(run, "resumed")


def test_gaps_are_named(tmp_path):
    run = run_of(tmp_path, *({"step": step, "actor/lr": 1} for step in (1, 2, 3, 4, 9, 10)))
    assert said(run, "1 gap(s) in the steps: 5 to 8")
    assert not said(run_of(tmp_path, *({"step": step, "actor/lr": 1} for step in (10, 20, 30))), "gap")


@pytest.mark.parametrize(
    "bad",
    [
        "[1, 2]",
        '{"a": 1}',
        "nonsense",
        "[" * 9000,
        *(f'{{"step": {step}}}' for step in ("-1", '"x"', "1.5", "1e30", "true")),
    ],
)
def test_lines_that_are_no_records_are_left_out_and_named(tmp_path, bad):
    run = run_of(tmp_path, {"step": 1, "actor/lr": 1}, bad, {"step": 2, "actor/lr": 2})
    assert list(run.steps) == [1, 2]
    assert said(run, "1 line(s) are no records and are left out: 2")


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    run = run_of(
        tmp_path,
        {
            "step": 1,
            "actor/lr": "text",
            "actor/grad_norm": [1],
            "actor/pg_loss": {"x": 1},
            "actor/entropy": True,
            "actor/ppo_kl": None,
            "actor/pg_clipfrac": 10**400,
        },
    )
    assert run.series.keys() == {"actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"}
    assert run.get("actor/entropy").values == [1.0]


def test_a_run_that_has_not_logged_a_step_is_its_configuration(tmp_path):
    (tmp_path / "resolved_config.yaml").write_text("trainer: {seed: 3}\n")
    run = read_run(tmp_path)
    assert run.settings == {"trainer.seed": 3}
    assert said(run, "no step was logged")


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "!!python/object:os.system {}", "\0", "a: &a [*a]"])
def test_a_damaged_configuration_is_named_and_runs_nothing(tmp_path, text):
    (tmp_path / "resolved_config.yaml").write_text(text)
    lines(tmp_path / "metrics.jsonl", {"step": 1, "actor/lr": 1})
    run = read_run(tmp_path)
    assert list(run.steps) == [1]


def test_secrets_of_the_configuration_stay_out(tmp_path):
    (tmp_path / "resolved_config.yaml").write_text(
        "ray_kwargs: {ray_init: {runtime_env: {env_vars: {API_KEY: hunter2, X: 'https://me:pw123@host'}}}}\n"
    )
    run = read_run(tmp_path)
    assert "hunter2" not in repr(run)
    assert "pw123" not in repr(run)


def test_alerts_and_how_it_ended(tmp_path):
    lines(tmp_path / "metrics.jsonl", {"step": 1, "actor/lr": 1})
    lines(
        tmp_path / "alerts.jsonl",
        {"step": 1, "title": "t", "text": "x"},
        {"step": 1, "title": "only"},
        "half",
    )
    lines(tmp_path / "ending.json", {"status": 143, "reason": "SIGTERM"})
    run = read_run(tmp_path)
    assert [(alert.step, alert.title, alert.text) for alert in run.alerts] == [(1, "t", "x")]
    assert run.ending is not None
    assert (run.ending.status, run.ending.reason) == (143, "SIGTERM")


def test_some_steps_only(tmp_path):
    folder = write_run(tmp_path, healthy(steps=9), [{"output": "a", "score": 1.0}])
    run = read_run(folder, 3, 5)
    assert list(run.steps) == [3, 4, 5]
    assert list(run.get(SCORE).steps) == [3, 4, 5]
    assert not run.samples
    assert said(run, "Only steps 3 to 5")


def test_a_part_of_a_run_shows_nothing_of_its_other_steps(tmp_path):
    """Neither how it ended, unless its last step is among them, nor replays, token records or histograms."""
    folder = write_run(tmp_path, healthy(steps=9))
    (folder / "ending.json").write_text(json.dumps({"status": 1, "reason": "Ctrl-C"}))
    replays = [{"step": step, "version": 0, "tokens": 1, "gap": 0.1} for step in (4, 9)]
    (folder / "diagnosis.json").write_text(json.dumps({"replayed": replays}))
    first, *others = ({"step": step, "name": LOG_RATIO, "bins": [[0, step]]} for step in (2, 4, 9))
    lines(folder / "histograms.jsonl", first | {"edges": [0.1, 0.2]}, *others)
    write_tokens(folder, [token_record(2), token_record(4)])
    run = read_run(folder, 3, 5)
    assert verdict_of(run).progress == "The log goes to step 5."
    assert [record.step for record in run.replays] == [4]
    assert list(run.heat_map.steps) == [4]
    assert sum(run.heat_map.counts[0]) == 4
    assert run.tokens.steps == [4]
    assert said(run, "Token records of 1 steps were read")
    assert (
        verdict_of(read_run(folder, 9)).progress
        == "The run ended after 9 of 9 steps with exit code 1: Ctrl-C."
    )


def test_steps_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(NothingToReadError, match="a step from 20 to 30; it has steps 1 to 9"):
        read_run(write_run(tmp_path, healthy(steps=9)), 20, 30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "must be a run's folder"),
        (lambda path: path.write_bytes(b"\x7fELF\0\0\1"), "must be a run's folder"),
        (lambda path: path.write_text("<!doctype html><p>step:1 of it</p>"), "must be a run's folder"),
        (lambda path: path.write_text(""), "must be a run's folder"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_text("")), "must be a run's folder"),
    ],
)
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, make, words):
    make(tmp_path / "x")
    with pytest.raises(NothingToReadError, match=words) as refused:
        read_run(tmp_path / "x")
    assert "\n" not in str(refused.value)


def test_a_folder_of_runs_names_them(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / name, {SCORE: [1.0]})
    with pytest.raises(NothingToReadError, match="folder of runs: a, b"):
        read_run(tmp_path)


def test_metrics_alone_in_a_file(tmp_path):
    path = lines(tmp_path / "copied.jsonl", {"step": 1, SCORE: 0.5})
    assert list(read_run(path).get(SCORE).values) == [0.5]


def test_reading_needs_no_torch():
    heavy = "{'torch', 'ray', 'transformers', 'wandb', 'matplotlib'}"
    code = f"import sys, verl_rc.insight.page; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_alerts_have_their_cause_and_evidence(tmp_path):
    run = write_run(tmp_path / "run", healthy(5))
    lines = [
        {
            "step": 2,
            "title": "gap: temperature",
            "text": "cooler",
            "cause": "temperature",
            "since_step": 1,
            "evidence": {"temperature_slope": -0.1, "z": "NaN", "x": []},
        },
        {"step": 3, "title": "t", "text": "u", "cause": "c", "since_step": "x", "evidence": [1]},
        {"step": 4, "title": "t", "text": "u"},
    ]
    (run / "alerts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = read_run(run).alerts
    assert (first.cause, first.evidence["temperature_slope"]) == ("temperature", -0.1)
    assert set(first.evidence) == {"temperature_slope", "z"}
    assert dict(second.evidence) == {}
    assert (third.cause, dict(third.evidence)) == ("", {})


def test_records_of_an_earlier_version_are_left_out_of_an_own_run(tmp_path):
    folder = write_run(tmp_path / "run", healthy())
    (folder / "tokens").mkdir()
    (folder / "tokens/step_000001.parquet").write_bytes(b"no facts of version 1")
    run = read_run(folder)
    assert run.tokens is None
    assert any("1 token record(s) cannot be read" in note for note in run.notes)
