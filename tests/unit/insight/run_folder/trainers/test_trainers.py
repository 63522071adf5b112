"""Every trainer's files give the rows that were written; what is no row says why, in a sentence."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_layouts import STEPS, WRITERS, miles, planted_rows, write_layout
from planted_series import healthy, write_run

from verl_rc.cli import main
from verl_rc.data.token_record import DamagedRecordError, TokenRecord
from verl_rc.insight.run_folder import NothingToReadError, read_run
from verl_rc.insight.run_folder import token_source as source_of
from verl_rc.insight.run_folder.trainers.tensors import load_mapping, load_tensors
from verl_rc.insight.verdict import judge

ALL = sorted(WRITERS)
HAVE_NO_SCORE = ("prime-rl", "SkyRL")


def record_at(folder: Path, step: int) -> TokenRecord:
    source = source_of(folder)
    assert source is not None
    return source.read(step)


def as_rows(record: TokenRecord) -> list[dict[str, Any]]:
    """By response ids, for ranks and dumps have orders of their own."""
    assert record.prompts is not None
    rows = []
    for index in range(len(record.lengths)):
        place = record.span(index)
        rows.append({name: values[place].tolist() for name, values in record.tokens.items()})
        rows[-1] |= {"prompt_ids": record.prompts[index].tolist()}
        rows[-1] |= {name: values[index] for name, values in record.rows.items()}
    return sorted(rows, key=lambda row: row["response_ids"])


@pytest.mark.parametrize("trainer", ALL)
def test_the_rows_that_were_written_are_read(tmp_path: Path, trainer: str) -> None:
    folder = write_layout(tmp_path / "run", trainer)
    source = source_of(folder)
    assert source is not None
    assert (source.trainer, tuple(source.steps)) == (trainer, STEPS)
    for step in STEPS:
        found = as_rows(source.read(step))
        written = sorted(planted_rows(step), key=lambda row: row["response_ids"])
        assert len(found) == len(written)
        for row, expected in zip(found, written, strict=True):
            for name in ("prompt_ids", "response_ids", "response_mask", "advantage"):
                assert row[name] == expected[name], (step, name)
            for name in ("rollout_log_prob", "old_log_prob"):
                np.testing.assert_array_equal(row[name], expected[name], err_msg=name)
            if trainer not in HAVE_NO_SCORE:
                assert row["score"] == expected["score"]
        groups = {row["group"]: row["prompt_ids"] for row in found}
        assert len(groups) == len({tuple(prompt) for prompt in groups.values()}) == 4


@pytest.mark.parametrize("trainer", ALL)
def test_a_report_says_what_it_took_the_folder_for(
    tmp_path: Path, trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_layout(tmp_path / "run", trainer)
    assert main(["report", str(folder)]) == 0
    assert f"read as: {trainer} records" in capsys.readouterr().out
    run = read_run(folder)
    ratios = np.concatenate([np.exp(log_ratio(record_at(folder, step))) for step in STEPS])
    assert sum(run.get("ledger/sampled_tokens").values) == len(ratios)
    assert run.get("rollout_corr/k3_kl").values[0] == pytest.approx(
        np.mean([r - 1 - np.log(r) for r in np.exp(log_ratio(record_at(folder, 1)))]), rel=1e-9
    )


def log_ratio(record: TokenRecord) -> Any:
    """Of the sampled tokens."""
    logs = record.log_ratio()
    assert logs is not None
    return logs[record.tokens["response_mask"]]


@pytest.mark.parametrize("trainer", ALL)
def test_converted_records_are_the_same_and_have_the_same_verdict(tmp_path: Path, trainer: str) -> None:
    folder, output = write_layout(tmp_path / "run", trainer), tmp_path / "out.jsonl"
    assert main(["convert", str(folder), str(output)]) == 0
    for step in STEPS:
        assert as_rows(record_at(output, step)) == as_rows(record_at(folder, step))
    assert [dict(read_run(path).get("rollout_corr/k3_kl").by_step()) for path in (folder, output)] == [
        dict(read_run(folder).get("rollout_corr/k3_kl").by_step())
    ] * 2


def test_what_slime_s_rollout_dump_alone_knows_is_joined(tmp_path: Path) -> None:
    (row, *_) = as_rows(record_at(write_layout(tmp_path, "slime"), 3))
    assert row["group"] == 100 + row["prompt_ids"][1]
    assert set(row["version"]) == {3}
    assert row["finished"]


def test_half_a_last_line_is_left_out_and_named(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, "NeMo-RL", (1,))
    path = folder / "train_data_step1.jsonl"
    path.write_text(path.read_text()[:-40])
    source = source_of(folder)
    assert source is not None
    assert len(source.read(1).lengths) == len(planted_rows(1)) - 1
    assert "train_data_step1.jsonl: 1 line(s) are half written or no rows, and left out: 8." in source.notes


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"old_log_prob": [-1.0]}, "response_mask has 6, old_log_prob 4"),
        ({"rollout_log_prob": [0.5] * 3}, "rollout_log_prob must be at most 0; .* sampled tokens have more"),
        (
            {"rollout_log_prob": [0.0] * 3},
            "rollout_log_prob is 0 for every sampled token: it was not computed",
        ),
    ],
)
def test_rows_that_are_none_say_why(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    folder = tmp_path
    WRITERS["prime-rl"](folder, 1, planted_rows(1, count=1, **changed))
    with pytest.raises(DamagedRecordError, match=why):
        record_at(folder, 1)
    with pytest.raises(NothingToReadError, match=why):  # no step is left, and the user reads why
        read_run(folder)


def test_a_mask_of_zeros_says_so(tmp_path: Path) -> None:
    write_layout(tmp_path, "slime", (1,), response_mask=[0, 0, 0], count=1)
    with pytest.raises(DamagedRecordError, match="response_mask must mark the tokens"):
        record_at(tmp_path, 1)


def test_log_probs_of_the_trainer_that_were_skipped_are_none(tmp_path: Path) -> None:
    write_layout(tmp_path, "NeMo-RL", (1,), old_log_prob=[0.0] * 3, count=1)
    assert "old_log_prob" not in record_at(tmp_path, 1).tokens
    run = read_run(tmp_path)
    assert any("hold no log-probs of the trainer" in note for note in run.notes)
    (gap,) = (statement for statement in judge(run).statements if statement.topic == "gap")
    assert "verl-rc diagnose RUN --model FOLDER" in gap.text


def test_a_folder_of_two_trainers_is_refused(tmp_path: Path) -> None:
    write_layout(write_layout(tmp_path, "slime"), "NeMo-RL")
    with pytest.raises(NothingToReadError, match="it holds token files of NeMo-RL and slime"):
        read_run(tmp_path)
    own = write_run(tmp_path / "own", healthy(3))
    write_layout(own, "prime-rl")
    with pytest.raises(NothingToReadError, match="a run of verl_rc and token files of prime-rl"):
        read_run(own)


@pytest.mark.parametrize("command", ["report", "diagnose", "convert"])
def test_every_command_refuses_a_run_of_ours_with_files_of_another_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = write_run(write_layout(tmp_path / "run", "NeMo-RL", (1,)), healthy())
    output = [str(tmp_path / "out.jsonl")] if command == "convert" else []
    assert main([command, str(folder), *output]) == 2
    said = "must hold the files of one trainer; it holds a run of verl_rc and token files of NeMo-RL. Pass a"
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out.jsonl").exists()


def test_prime_rl_s_metrics_are_no_run_of_ours(tmp_path: Path) -> None:
    lines = [
        {"step": step, **one}
        for step in (1, 2)
        for one in ({"mismatch_kl/all/mean": 2e-4, "optim/grad_norm": 0.5}, {"reward/all/mean": 0.25 * step})
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert (run.source, run.is_own) == ("prime-rl run", False)
    assert list(run.get("rollout_corr/k3_kl").values) == [2e-4, 2e-4]
    assert list(run.get("critic/score/mean").values) == [0.25, 0.5]


def test_raw_log_probs_at_another_temperature_are_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "x.jsonl"
    assert main(["convert", str(write_layout(tmp_path / "run", "SkyRL")), str(output)]) == 0
    facts, *rows = output.read_text().splitlines()
    assert json.loads(facts)["logprobs_mode"] == "raw_logprobs"
    output.write_text("\n".join([json.dumps({**json.loads(facts), "temperature": 0.7}), *rows]))
    capsys.readouterr()
    assert main(["diagnose", str(output)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "fault: raw log-probs at another temperature: By its records the engine samples at"
    )


def test_rows_that_context_parallelism_cut_are_refused(tmp_path: Path) -> None:
    miles(tmp_path, 1, planted_rows(1), cp_size=2)
    with pytest.raises(DamagedRecordError, match="it was cut in 2 by context parallelism"):
        record_at(tmp_path, 1)


def test_a_dump_with_other_fields_says_so(tmp_path: Path) -> None:
    (tmp_path / "train_data").mkdir()
    torch.save({"format_version": 2, "samples": [{"tokens": [1, 2]}]}, tmp_path / "train_data/1.pt")
    with pytest.raises(DamagedRecordError, match="its fields are not those of slime: KeyError"):
        record_at(tmp_path, 1)
    torch.save({"format_version": 1, "samples": []}, tmp_path / "train_data/1.pt")
    with pytest.raises(DamagedRecordError, match="its format_version must be 2, got 1"):
        record_at(tmp_path, 1)


def test_a_file_of_facts_alone_and_one_of_nothing_are_named(tmp_path: Path) -> None:
    for step, text in ((1, '{"token_record": 1, "trainer": "mine"}\n'), (2, "")):
        (tmp_path / f"step_{step:06d}.rank_0.jsonl").write_text(text)
        with pytest.raises(DamagedRecordError, match=r"every row of step 1 must have|no facts"):
            record_at(tmp_path, step)
    with pytest.raises(NothingToReadError):
        read_run(tmp_path)


class Harmful:
    """What a pickle can do when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


def test_a_pickle_that_names_more_than_arrays_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickled = tmp_path / "dumped_data/global_step_1_training_input.pkl"
    pickled.parent.mkdir()
    pickled.write_bytes(pickle.dumps({"a": Harmful(str(made))}))
    with pytest.raises(DamagedRecordError, match=r"it names posix\.mkdir, which is no array"):
        load_mapping(pickled, ("skyrl_train",))
    torch.save({"a": Harmful(str(made))}, tmp_path / "x.pt")
    with pytest.raises(DamagedRecordError, match=r"posix\.mkdir"):
        load_tensors(tmp_path / "x.pt")
    assert not made.exists()


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]
)
def test_tensors_of_every_kind_and_layout(tmp_path: Path, kind: torch.dtype) -> None:
    values = (torch.arange(12).reshape(3, 4) % 2).to(kind)
    torch.save({"whole": values, "turned": values.T, "part": values[1:, 1::2]}, tmp_path / "x.pt")
    found = load_tensors(tmp_path / "x.pt")
    for name, expected in (("whole", values), ("turned", values.T), ("part", values[1:, 1::2])):
        assert found[name].tolist() == expected.tolist(), name


@pytest.mark.parametrize("kept", [0, 10, 500])
def test_a_cut_off_dump_is_damaged(tmp_path: Path, kept: int) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:kept])
    with pytest.raises(DamagedRecordError, match=r"no file of torch\.save"):
        load_tensors(tmp_path / "x.pt")


def test_of_many_gigabytes_some_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(tmp_path, "NeMo-RL", range(1, 31))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr("verl_rc.insight.run_folder.token_files.MOST_BYTES", total // 9)
    source = source_of(tmp_path)
    assert source is not None
    assert source.steps == [1, 11, 21, 30]
    assert any("4 of 30 steps were read" in note for note in source.notes)


def test_open_instruct_has_the_engine_s_side_alone(tmp_path: Path) -> None:
    line = {
        "prompt_tokens": [1, 2],
        "response_tokens": [3, 4, 5],
        "logprobs": [-0.5, 1.0, -0.25],
        "reward": 1.0,
        "prompt_idx": 4,
        "step": 9,
    }
    for shard, steps in enumerate(((8, 9), (9, 10))):  # shards hold the rows of any steps
        text = "".join(json.dumps({**line, "step": step}) + "\n" for step in steps)
        (tmp_path / f"grpo_rollouts_{shard:06d}.jsonl").write_text(text)
    run = read_run(tmp_path)
    assert run.tokens is not None
    assert [(step, len(record_at(tmp_path, step).lengths)) for step in run.tokens.steps] == [
        (8, 1),
        (9, 2),
        (10, 1),
    ]
    row = run.tokens.rows[0]
    assert row.tokens["response_mask"].tolist() == [True, False, True]
    assert "old_log_prob" not in row.tokens
    assert any("the gap cannot be told without the trainer's" in note for note in run.notes)
