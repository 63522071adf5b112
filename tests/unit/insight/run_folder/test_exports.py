"""Metrics of TRL's state, and of a history that W&B has exported."""

import json
from pathlib import Path

import pytest

from verl_rc.insight.run_folder import NothingToReadError, read_run


def test_trl_s_newest_checkpoint(tmp_path: Path) -> None:
    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [
            {"step": n, "reward": 0.1 * n, "grad_norm": 0.5, "sampling/sampling_logp_difference/mean": 0.02}
            for n in range(1, step + 1)
        ]
        state = {"global_step": step, "log_history": [*history, {"step": step, "eval_reward": 0.9}]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    for path in (tmp_path, tmp_path / "checkpoint-10", tmp_path / "checkpoint-10/trainer_state.json"):
        run = read_run(path)
        assert run.source == "TRL's trainer_state.json"
        assert list(run.steps) == list(range(1, 11))
        assert run.get("critic/score/mean").values[-1] == pytest.approx(1.0)
        assert set(run.get("sync/rollout_gap_mean").values) == {0.02}
        assert not any("repeat a step" in note for note in run.notes)
    (tmp_path / "checkpoint-10/trainer_state.json").write_text('{"log_history": [{"st')
    with pytest.raises(NothingToReadError):
        read_run(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "_step,mismatch/mismatch_kl,text\n1,0.5,a\n2,0.25,b\n"),
        ("ui.csv", "Step,run one - mismatch/mismatch_kl\n1,0.5\n2,0.25\n"),
        (
            "x.json",
            '[{"_step": 1, "mismatch/mismatch_kl": 0.5}, {"_step": 2, "mismatch/mismatch_kl": 0.25}]',
        ),
        (
            "x.jsonl",
            '{"_step": 1, "mismatch/mismatch_kl": 0.5}\n{"_step": 2, "mismatch/mismatch_kl": 0.25}\n{"_st',
        ),
        (
            "own.jsonl",
            '{"_step": 70, "global_step": 1, "mismatch/mismatch_kl": 0.5}\n'
            '{"_step": 71, "global_step": 2, "mismatch/mismatch_kl": 0.25}',
        ),
    ],
)
def test_exports_of_a_history(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    run = read_run(tmp_path / name)
    assert run.source == "W&B export"
    assert run.get("rollout_corr/kl").by_step() == {1: 0.5, 2: 0.25}


def test_rows_without_the_training_step_belong_to_the_one_before(tmp_path: Path) -> None:
    """W&B's own step counts calls of log: a table of completions takes one, and training seems to go back."""
    rows: list[dict[str, object]] = [{"_step": 0, "eval/score": 0.5}]
    for step in range(1, 6):
        rows.append({"train/global_step": step, "train/loss": float(step)})
        rows.append({"completions": {"_type": "table"}})
        rows.append({"eval/score": step / 10})
    path = tmp_path / "history.json"
    path.write_text(json.dumps([{"_step": call, **row} for call, row in enumerate(rows)]))
    run = read_run(path)
    assert run.get("train/loss").by_step() == {step: float(step) for step in range(1, 6)}
    assert run.get("eval/score").by_step() == {0: 0.5, **{step: step / 10 for step in range(1, 6)}}
    assert not any("went on" in note for note in run.notes)


def test_an_export_of_several_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ui.csv").write_text("Step,run a - loss,run a - loss__MIN,run b - loss\n1,0.5,0.5,0.25\n")
    with pytest.raises(NothingToReadError, match="the history of one run; it has columns of run a, run b"):
        read_run(tmp_path / "ui.csv")
