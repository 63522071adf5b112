"""Metrics of TRL and of W&B's files, the latter written by W&B itself."""

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


def test_an_offline_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", dir=str(tmp_path), settings=wandb.Settings(console="off"))
    long = {f"filler/{number}": float(number) for number in range(3_000)}  # a record of more than one block
    for step in (1, 2, 3):
        run.log({"mismatch/mismatch_k3_kl": 1e-4 * step, "nested": {"value": 2.0}, **long}, step=step)
    run.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    found = read_run(folder)
    assert found.source == "W&B offline run"
    assert list(found.steps) == [1, 2, 3]
    assert list(found.get("rollout_corr/k3_kl").values) == pytest.approx([1e-4, 2e-4, 3e-4])
    assert list(found.get("filler/2999").values) == [2999.0] * 3
    (file,) = folder.glob("*.wandb")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])  # a killed run
    assert list(read_run(file).steps) in ([1], [1, 2])
    file.write_bytes(b"no run")
    with pytest.raises(NothingToReadError):
        read_run(file)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "_step,train/gen_kl_error,text\n1,0.5,a\n2,0.25,b\n"),
        ("ui.csv", "Step,run one - train/gen_kl_error\n1,0.5\n2,0.25\n"),
        ("x.json", '[{"_step": 1, "train/gen_kl_error": 0.5}, {"_step": 2, "train/gen_kl_error": 0.25}]'),
        (
            "x.jsonl",
            '{"_step": 1, "train/gen_kl_error": 0.5}\n{"_step": 2, "train/gen_kl_error": 0.25}\n{"_st',
        ),
        (
            "own.jsonl",
            '{"_step": 70, "global_step": 1, "gen_kl_error": 0.5}\n'
            '{"_step": 71, "global_step": 2, "gen_kl_error": 0.25}',
        ),
    ],
)
def test_exports_of_a_history(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    run = read_run(tmp_path / name)
    assert run.source == "W&B export"
    assert run.get("rollout_corr/k3_kl").by_step() == {1: 0.5, 2: 0.25}
