"""``verl-rc report``: what it prints, what it writes, and one sentence with exit code 2 for what it cannot
read."""

import json

import pytest
from planted_series import healthy, write_run

from verl_rc.cli import main


def test_it_prints_the_verdict_and_where_the_page_is(tmp_path, capsys):
    folder = write_run(tmp_path / "run", healthy())
    assert main(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Nothing is wrong, as far as metrics tell. The log goes to step 40 of 40.")
    assert [line.split(":")[0].strip() for line in lines[1:5]] == ["learning", "gap", "correction", "speed"]
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.glob(".report*"))


def test_json_is_for_machines(tmp_path, capsys):
    folder = write_run(tmp_path / "run", healthy())
    assert main(["report", str(folder), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["report"], written["run"]) == (str(folder / "report.html"), "run")
    assert written["verdict"]["level"] == "good"
    assert written["verdict"]["statements"][1]["evidence"]["gap"] > 0


def test_a_log_of_verl_has_its_page_beside_it(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("(TaskRunner pid=1) step:1 - critic/score/mean:0.5 - actor/grad_norm:1.0\n")
    assert main(["report", str(log)]) == 0
    assert (tmp_path / "train.report.html").is_file()
    assert "calculate_log_probs" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--last", "5"], ["--steps", "36-40"]])
def test_some_steps_only(tmp_path, options):
    folder = write_run(tmp_path / "run", healthy())
    assert main(["report", str(folder), *options]) == 0
    page = (folder / "report.html").read_text()
    assert "Only steps 36 to 40 are shown" in page


def test_no_text(tmp_path):
    folder = write_run(tmp_path / "run", healthy(), [{"output": "PRIVATE-WORDS", "score": 1.0}])
    main(["report", str(folder), "--no-text"])
    assert "PRIVATE-WORDS" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "no such file"),
        (["."], "folder of runs: a, b"),
        (["a", "b"], "compare runs in W&B, or write a report of each"),
        (["a", "b", "c", "--output", "x.html"], "compare runs in W&B, or write a report of each"),
        (["a", "--no-text", "b"], "compare runs in W&B, or write a report of each"),
        (["a", "--output", "none/x.html"], "No such file"),
        (["empty"], "must be a run's folder"),
    ],
)
def test_what_it_refuses(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / name, healthy(steps=3))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl-rc report: ")
    assert words in line


@pytest.mark.parametrize(
    "arguments", [["a", "--last", "0"], ["a", "--steps", "5-3"], ["a", "--steps", "x"], []]
)
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(SystemExit) as refused:
        main(["report", *arguments])
    assert refused.value.code == 2


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", healthy(steps=3))
    (folder / "report.html").mkdir()
    assert main(["report", str(folder)]) == 2
    assert not list(folder.glob(".report*"))
    assert len(capsys.readouterr().err.splitlines()) == 1
