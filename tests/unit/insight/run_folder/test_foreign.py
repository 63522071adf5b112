"""verl's logs of every era, TRL's, slime's and NeMo-RL's names, and TensorBoard's files say the same as a run
of ours would."""

import json
import math
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from verl_rc.insight.run_folder import foreign, read_run
from verl_rc.insight.run_folder.event_files import DamagedFileError, read_scalars
from verl_rc.metrics.catalog import CATALOG

CONSOLE = "\n".join(
    (
        "Using RayPPOTrainer",
        "(TaskRunner pid=4242) step:0 - val-core/openai/gsm8k/reward/mean@1:0.25",
        "\x1b[36m(TaskRunner pid=4242)\x1b[0m step:1 - actor/pg_loss:0.0125 - "
        "critic/score/mean:np.float64(0.5) - rollout_corr/kl:1.5e-3 - rollout_corr/k3_kl:np.float32(0.0011) "
        "- timing_s/step:12\x1b[0m",
        "Training Progress:   2%|2 | 1/50 [00:12<10:02]\r(TaskRunner pid=4242) step:2 - "
        "critic/score/mean:-.5 - actor/grad_norm:nan - perf/throughput:1,5",
        "step:3",
        "global step:4 - nothing here",
        "epoch: 1 | step:5 | loss 0.1",
    )
)


def test_console_lines_behind_any_prefix(tmp_path):
    (tmp_path / "train.log").write_text(CONSOLE)
    run = read_run(tmp_path / "train.log")
    assert run.source == "verl's console log"
    assert list(run.steps) == [0, 1, 2]
    assert list(run.get("val-core/openai/gsm8k/reward/mean@1").values) == [0.25]
    assert list(run.get("critic/score/mean").values) == [0.5, -0.5]
    assert list(run.get("rollout_corr/k3_kl").values) == [0.0011]
    assert list(run.get("timing_s/step").values) == [12]
    assert math.isnan(run.series["actor/grad_norm"].values[0])
    assert "perf/throughput" not in run.series


def file_logger(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_file_logger(tmp_path):
    records = [
        {"step": 7, "data": {"critic/score/mean": 0.5, "actor/grad_norm": None, "note": "x"}},
        {"step": 8, "data": {}},
    ]
    path = file_logger(tmp_path / "exp.jsonl", records)
    with path.open("a") as file:
        file.write('{"step": 9, "data": {"critic/sc')
    run = read_run(path)
    assert run.source == "verl's file logger"
    assert list(run.steps) == [7, 8]
    assert list(run.get("critic/score/mean").values) == [0.5]
    assert math.isnan(run.series["actor/grad_norm"].values[0])
    assert any("begins at step 7" in note for note in run.notes)
    assert any("the last line is half written" in note for note in run.notes)
    assert any("verl-rc migrate" in note for note in run.notes)


def test_a_first_line_longer_than_what_is_sniffed(tmp_path):
    data = {f"timing_s/stage_{number}": 1.0 for number in range(2000)}
    assert list(read_run(file_logger(tmp_path / "exp.jsonl", [{"step": 1, "data": data}])).steps) == [1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mismatch/mismatch_kl", "rollout_corr/kl"),
        ("mismatch/mismatch_k3_kl", "rollout_corr/k3_kl"),
        ("mismatch/mismatch_training_ppl", "rollout_corr/training_ppl"),
        ("mismatch/mismatch_log_ppl_diff", "rollout_corr/log_ppl_diff"),
        ("mismatch/rollout_is_mean", "rollout_corr/rollout_is_raw_mean"),
        ("mismatch/rollout_is_eff_sample_size", "rollout_corr/rollout_is_eff_sample_size"),
        ("mismatch/rollout_is_p99", "rollout_corr/rollout_is_p99"),
        ("mismatch/rollout_is_clipped_fraction", "rollout_corr/rollout_is_oob_ratio"),
        ("actor/rollout_corr/k3_kl", "rollout_corr/k3_kl"),
        ("sampling/sampling_logp_difference/mean", "sync/rollout_gap_mean"),
        ("train/train_rollout_logprob_abs_diff", "sync/rollout_gap_mean"),
        ("train/gen_kl_error", "rollout_corr/k3_kl"),
        ("actor/pg_loss", "actor/pg_loss"),
        ("sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/mean"),
    ],
)
def test_names_of_all_eras(theirs, ours):
    assert foreign.catalogue_name(theirs) == ours
    assert theirs.startswith("sampling/importance") or CATALOG.find(ours) is not None


def test_rollout_dumps_are_samples_and_scores(tmp_path):
    for step, scores in ((2, (1.0, 0.0)), (10, (1.0, 1.0))):
        rows = [
            {"input": "q", "output": f"a{score}", "gts": "a", "score": score, "step": step}
            for score in scores
        ]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{half")
    run = read_run(tmp_path)
    assert run.source == "verl's rollout dumps"
    assert list(run.steps) == [2, 10]
    assert list(run.get("critic/score/mean").values) == [0.5, 1.0]
    assert [sample.cells["output"] for sample in run.samples] == ["a1.0", "a0.0", "a1.0", "a1.0"]


def test_rows_of_a_dump_without_a_score_are_left_out_and_counted(tmp_path):
    rows = [{"output": "a", "score": 1.0}, {"output": "b"}, {"output": "c", "score": None}, {"score": 1.0}]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{half")
    run = read_run(tmp_path)
    assert run.get("critic/score/mean").by_step() == {1: 1.0}
    assert [sample.cells["output"] for sample in run.samples] == ["a"]
    assert any("3 line(s) of dumps have no output or score" in note for note in run.notes)
    assert any("1 line(s) are half written" in note for note in run.notes)


def test_of_too_many_samples_the_first_and_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        row = json.dumps({"output": str(step), "score": 1.0}) + "\n"
        (tmp_path / f"{step}.jsonl").write_text(row * 600)
    run = read_run(tmp_path)
    assert [(run.samples[0].step, run.samples[-1].step), len(run.samples)] == [(1, 5), 2_000]
    assert any(
        "3,000 samples were recorded; the first 1,000 and the newest 1,000 were read" in n for n in run.notes
    )


def test_tensorboard_wrote_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("config", "x")
        for step in range(1, 4):
            writer.add_scalar("critic/score/mean", step / 4, step)
            writer.add_scalar("mismatch/mismatch_kl", 0.25, step, new_style=True)
            writer.add_histogram("h", torch.tensor([1.0, 2.0]), step)
    run = read_run(tmp_path)
    assert run.source == "TensorBoard event files"
    assert list(run.steps) == [1, 2, 3]
    assert list(run.get("critic/score/mean").values) == [0.25, 0.5, 0.75]
    assert list(run.get("rollout_corr/kl").values) == [0.25] * 3
    assert sorted(run.series) == ["critic/score/mean", "rollout_corr/kl"]
    (file,) = tmp_path.glob("*tfevents*")
    assert list(read_run(file).steps) == [1, 2, 3]


def event(step: int, tag: bytes, value: float) -> bytes:
    """A record after the format's definition; checksums are not looked at."""
    entry = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(entry)]) + entry
    message = (
        b"\x09" + struct.pack("<d", 1.0) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary
    )
    return struct.pack("<Q", len(message)) + b"\0\0\0\0" + message + b"\0\0\0\0"


def test_event_files_by_hand_cut_off_anywhere(tmp_path):
    path, first, second = tmp_path / "x.tfevents.1", event(1, b"a/b", 0.5), event(2, b"a/b", 1.5)
    for kept in range(len(second)):
        path.write_bytes(first + second[:kept])
        assert list(read_scalars(path)) == [(1, "a/b", 0.5)]
    path.write_bytes(first + second)
    assert list(read_scalars(path)) == [(1, "a/b", 0.5), (2, "a/b", 1.5)]


@pytest.mark.parametrize("place", range(12, 40))
def test_damaged_event_files_never_break_the_reader(tmp_path, place):
    data = bytearray(event(1, b"a/b", 0.5))
    data[place] ^= 0xFF
    path = tmp_path / "x.tfevents.1"
    path.write_bytes(bytes(data))
    with suppress(DamagedFileError):
        list(read_scalars(path))


def test_tags_of_event_files_count_steps_of_their_own(tmp_path):
    """Four updates a rollout, rollouts counted apart; a second process logs from step 0 on; and a resumed one
    goes back from step 7 to 6."""
    updates = [(4 * rollout + update, b"train/loss", 1.0) for rollout in range(2) for update in range(4)]
    mixed = [(0, b"rollout/reward", 0.5), *updates[:4], (1, b"rollout/reward", 0.75), *updates[4:]]
    for name, events in {"1": mixed, "2": [(0, b"eval/score", 0.25)], "3": [(6, b"train/loss", 9.0)]}.items():
        (tmp_path / f"x.tfevents.{name}").write_bytes(b"".join(event(*one) for one in events))
    run = read_run(tmp_path)
    assert run.get("train/loss").by_step() == {**dict.fromkeys(range(6), 1.0), 6: 9.0}
    assert run.get("rollout/reward").by_step() == {0: 0.5, 1: 0.75}
    assert run.get("eval/score").by_step() == {0: 0.25}
    (restart,) = [note for note in run.notes if "went on" in note]
    assert restart.startswith("The run went on at step 6 after it had reached 7;")
