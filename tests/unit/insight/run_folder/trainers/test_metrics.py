"""Metrics of TRL and of W&B's files, the latter written by W&B itself."""

import json
import struct
import time
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
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Not by WANDB_MODE: W&B reads it once a process, which another test may have made it do.
    settings = wandb.Settings(console="off")
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path), settings=settings)
    long = {f"filler/{number}": float(number) for number in range(3_000)}  # a record of more than one block
    for step in (1, 2, 3):
        run.log({"mismatch/mismatch_k3_kl": 1e-4 * step, "nested": {"value": 2.0}, **long}, step=step)
    run.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    deadline = time.monotonic() + 120  # finish() does not wait until W&B's process has closed the file
    while len((found := read_run(folder)).steps) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
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


def field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""

    def varint(value: int) -> bytes:
        low, rest = value & 0x7F, value >> 7
        return bytes([low]) if not rest else bytes([low | 0x80]) + varint(rest)

    return varint(number << 3 | 2) + varint(len(content)) + content


def history(**metrics: object) -> bytes:
    pairs = ((name.encode(), json.dumps(value).encode()) for name, value in metrics.items())
    items = (field(1, field(1, name) + field(16, value)) for name, value in pairs)
    return field(2, b"".join(items))


def test_padding_at_the_end_of_a_block_is_no_record(tmp_path: Path) -> None:
    block, header = 32 << 10, struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    left = 3  # bytes of the block behind the first record, too few for another head
    room = block - left - len(header) - 7
    filler = next(
        record
        for length in range(room - 80, room)
        if len(record := history(_step=1, gen_kl_error=0.5, filler="x" * length)) == room
    )
    second = history(_step=2, gen_kl_error=0.25)
    parts = [struct.pack("<IHB", 0, len(record), 1) + record for record in (filler, second)]
    (tmp_path / "run-a.wandb").write_bytes(header + parts[0] + b"\0" * left + parts[1])
    assert read_run(tmp_path).get("rollout_corr/k3_kl").by_step() == {1: 0.5, 2: 0.25}


def test_what_stands_before_a_damaged_record_is_shown(tmp_path: Path) -> None:
    records = (history(_step=1, gen_kl_error=0.5), b"\xff" * 11)
    parts = [struct.pack("<IHB", 0, len(record), 1) + record for record in records]
    (tmp_path / "run-a.wandb").write_bytes(struct.pack("<4sHB", b":W&B", 0xBEE1, 0) + b"".join(parts))
    found = read_run(tmp_path)
    assert found.get("rollout_corr/k3_kl").by_step() == {1: 0.5}
    assert any(note.startswith("run-a.wandb is damaged: ") for note in found.notes)


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
