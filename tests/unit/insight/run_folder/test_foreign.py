"""verl's logs of every era and TRL's names say the same as a run of ours would; other files are refused
in a sentence."""

import json
import math
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from verl_rc.cli import main
from verl_rc.insight.run_folder import foreign, read_run
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
        ("train/sampling/sampling_logp_difference/max", "sync/rollout_gap_max"),
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


SEQUENCE = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "inference_logprobs": [0.0, -0.5, -0.25]}
TRACE = {"step": 9, "response_tokens": [3, 4], "logprobs": [-0.5, -0.25], "reward": 1.0, "prompt_idx": 4}
METRICS = {"step": 1, "mismatch_kl/all/mean": 2e-4, "optim/grad_norm": 0.5, "perf/throughput": 9.0}
DUMPS = {
    "train_data/1.pt": lambda path: zipfile.ZipFile(path, "w").writestr("1/data.pkl", pickle.dumps(SEQUENCE)),
    "dumped_data/global_step_1_training_input.pkl": lambda path: path.write_bytes(pickle.dumps(SEQUENCE)),
    "token_exports/step_1/rank_0.jsonl": lambda path: path.write_text(json.dumps(SEQUENCE) + "\n"),
    "train_data_step1.jsonl": lambda path: path.write_text(json.dumps(SEQUENCE) + "\n"),
    "grpo_rollouts_000001.jsonl": lambda path: path.write_text(json.dumps(TRACE) + "\n"),
    "metrics.jsonl": lambda path: path.write_text(json.dumps(METRICS) + "\n"),
    "run-a.wandb": lambda path: path.write_bytes(struct.pack("<4sHB", b":W&B", 0xBEE1, 0) + b"\x0a" * 40),
    "events.out.tfevents.1": lambda path: path.write_bytes(struct.pack("<Q", 24) + b"\x09" * 32),
}
"""Files of other trainers, W&B and TensorBoard that hold no token record and no log that is read."""


@pytest.mark.parametrize("command", ["report", "diagnose"])
@pytest.mark.parametrize("name", DUMPS)
def test_dumps_and_binary_logs_are_refused_with_what_to_do(tmp_path, capsys, name, command):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    DUMPS[name](path)
    for given in (tmp_path / "run", path):
        assert main([command, str(given)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"verl-rc {command}: {given} must be a run's folder, token records or a log")
        assert "write token records (docs/token_record.md), or export its metrics from W&B" in line
