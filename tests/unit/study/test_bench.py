"""``verl-rc bench METHOD --track short``: runs what is missing, counts nothing twice, refuses to mix."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from verl_rc.cli import main
from verl_rc.study import bench, runs
from verl_rc.study.bench import all_scores, run_method
from verl_rc.study.runs import read_runs
from verl_rc.study.study import ACCURACY
from verl_rc.study.tracks import TRACKS

START = 0.23
"""The accuracy of the model that runs begin from; kept ones begin at 0.25 and 0.21."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The trainer ends at once, its accuracy rises from START to 0.5; what was planted, run by run."""
    planted = list[str]()

    def start(overrides: Sequence[str], fault: str, core: int | None) -> int:
        given = dict(text.split("=", 1) for text in overrides)
        folder = Path(given["trainer.default_local_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        steps = int(given["trainer.total_training_steps"])
        accuracies = ((0, START), (steps, 0.5))
        lines = [{"step": step, ACCURACY: value, "timing_s/step": 1.0} for step, value in accuracies]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        planted.append(fault)
        return 0

    monkeypatch.setattr(runs, "start_trainer", start)
    monkeypatch.setattr(runs, "prepare", lambda *_: None)
    monkeypatch.setattr(runs, "refused", lambda *_, **__: {})
    monkeypatch.setattr(bench, "RUNS", tmp_path / "runs")
    return planted


def test_a_method_runs_once_and_stands_beside_those_whose_runs_are_kept(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "loss_mode=topr", "--track", "long", "--save", str(tmp_path), "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert started == ["fp8_cache"] * 3  # the control's runs are kept
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert len(started) == 3
    compared = [
        name for words in ("better than", "worse than", "not separable from") for name in first[words]
    ]
    assert len(compared) == len(set(compared))
    assert {"disabled", "decoupled_seq_is", "bypass_ppo_clip"} <= set(compared)
    kept = list(read_runs(tmp_path / "long.jsonl"))
    assert {(run.arm, run.seed) for run in kept} == {("fp8 loss_mode=topr", seed) for seed in (1, 2, 3)}
    assert all("torch 2" in run.versions and len(run.commit) == 40 for run in kept)


def test_a_method_that_a_study_has_run_needs_no_run(tmp_path: Path, started: list[str]) -> None:
    standing = run_method("short", "decoupled_seq_is", tmp_path, [None])
    assert started == []
    assert standing.score.by_condition.keys() == TRACKS["short"].conditions.keys()


def test_tracks_share_the_runs_of_a_condition_that_both_have(tmp_path: Path, started: list[str]) -> None:
    own = tmp_path / "mine.yaml"  # its runs are in no file of the project
    own.write_text("rollout_is: token\nrollout_is_threshold: 3\n")
    run_method("short", str(own), tmp_path, [None])
    assert len(started) == 21
    standing = run_method("noise", str(own), tmp_path, [None])
    assert len(started) == 21 + 6  # float32 and bf16: with fp8 weights it has run already
    assert standing.score.conditions == ["fp32", "bf16", "fp8"]


@pytest.mark.usefixtures("started")
def test_results_of_another_condition_or_version_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("rollout_is: token\nrollout_is_threshold: 3\n")
    run_method("long", str(own), tmp_path, [None])
    own.write_text("rollout_is: token\nrollout_is_threshold: 4\n")
    with pytest.raises(ValueError, match=r"rollout_is_threshold=3, .*rollout_is_threshold=4 differ"):
        run_method("long", str(own), tmp_path, [None])
    code = tmp_path / "bench_own_loss.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    code.write_text(
        "def mine(inputs):\n    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}\n"
    )
    run_method("long", "bench_own_loss:mine", tmp_path, [None])
    code.write_text("def mine(inputs):\n    return inputs.reduce(inputs.log_probs), {}\n")
    with pytest.raises(ValueError, match=r"hash of the user's file=\w+, hash .* differ"):
        run_method("long", "bench_own_loss:mine", tmp_path, [None])
    monkeypatch.setattr(bench, "versions", lambda: "torch 9")
    with pytest.raises(
        ValueError, match="must hold runs of the versions that are installed, torch 9; it has"
    ):
        run_method("long", "loss_mode=topr", tmp_path, [None])


def test_runs_from_another_model_than_the_controls_end_with_the_first_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[str],
) -> None:
    monkeypatch.setitem(globals(), "START", 0.4)
    command = ["bench", "loss_mode=topr", "--track", "long", "--save", str(tmp_path)]
    for _ in range(2):  # it is not run a second time
        assert main(command) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "begins at an accuracy of 0.40, the control at 0.21" in line
        assert started == ["fp8_cache"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["loss_mode=topr"], "say with --save where runs are kept"),
        (["loss_mode=torp", "--save", "kept"], "did you mean topr?"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--track", "short"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_package_without_its_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"must run in a checkout of verl_rc; .* is none: clone it"):
        run_method("short", "disabled", tmp_path, [None])


def test_every_track_that_trains_has_methods_beside_each_other() -> None:
    for name in ("short", "long"):
        found = {score.method for score in all_scores(name)}
        assert {"disabled", "decoupled_token_is", "decoupled_seq_is", "bypass_ppo_clip"} <= found
