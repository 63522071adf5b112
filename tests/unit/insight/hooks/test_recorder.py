"""What hooks share: they know versions and signatures, never disturb a run, and write files that are read."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl_rc.insight.hooks import recorder
from verl_rc.insight.hooks.recorder import Recorder, attaches, masked_rows, rows_of
from verl_rc.insight.run_folder.token_files import token_source

VERSIONS = ("1.16", "1.17")


class Trainer:
    def loss(self, model: Any, inputs: Any, more: int = 0) -> None: ...


def answer(
    installed: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    signature: tuple[str, ...] = ("self", "model"),
    name: str = "loss",
) -> str:
    """What is logged; empty where the hook attaches."""

    def version(package: str) -> str:
        if installed is None:
            raise recorder.metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(recorder.metadata, "version", version)
    caplog.set_level(logging.WARNING)
    assert attaches("TRL", "trl", VERSIONS, Trainer, {name: signature}) == (not caplog.text)
    return " ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("installed", ["1.16", "1.16.0", "1.16.3", "1.16.1.dev0", "1.16.0rc1", "1.16+cpu"])
def test_a_version_that_was_read(
    installed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert answer(installed, monkeypatch, caplog) == ""


@pytest.mark.parametrize("installed", ["1.15.9", "1.17.0", "1.17.0.dev0", "2.0", "0.29"])
def test_another_version_is_declined_in_a_sentence(
    installed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert answer(installed, monkeypatch, caplog) == (
        "verl_rc records no tokens of TRL: its hook knows trl from 1.16 to below 1.17, and "
        f"{installed} is installed."
    )


def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert "trl is not installed" in answer(None, monkeypatch, caplog)
    assert "there is none" in answer("1.16", monkeypatch, caplog, name="generate")


def test_another_signature(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said = answer("1.16", monkeypatch, caplog, ("self", "inputs"))
    assert "loss must take (self, inputs, …), and in trl 1.16 it takes (self, model, inputs, more)" in said


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"response_mask": [1, 1], "rollout_log_prob": torch.tensor([-1.0, -0.5]), **more}


def test_files_are_complete_step_by_step_and_read_back(tmp_path: Path) -> None:
    records = Recorder(tmp_path / "tokens", "TRL", rank=2, temperature=0.7)
    for step in (3, 3, 4):
        with records:
            records.write(step, iter([row(step, old_log_prob=torch.tensor([-1.1, float("-inf")]))]))
    assert [file.name for file in (tmp_path / "tokens").glob("step_*")] == ["step_000003.rank_2.jsonl"]
    records.close()
    source = token_source(tmp_path)
    assert source is not None
    assert (source.trainer, source.steps) == ("TRL", [3, 4])
    first = source.read(3)
    assert first.facts["temperature"] == 0.7
    assert first.lengths.tolist() == [2, 2]
    assert first.tokens["rollout_log_prob"].tolist() == [-1.0, -0.5, -1.0, -0.5]


def test_only_each_so_manieth_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_RC_TOKENS_EVERY", "5")
    records = Recorder(tmp_path, "TRL")
    assert [step for step in range(1, 12) if records.takes(step)] == [5, 10]


@pytest.mark.parametrize("every", ["ten", "0", "-1"])
def test_another_number_of_steps_ends_the_recording_and_not_the_run(
    every: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VERL_RC_TOKENS_EVERY", every)
    assert not Recorder(tmp_path, "TRL").takes(1)
    assert f"VERL_RC_TOKENS_EVERY must be a whole number above 0, got '{every}'" in caplog.text


def test_a_failing_write_ends_the_recording_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = Recorder(tmp_path, "TRL")

    def rows() -> Any:
        yield row(1)
        raise OSError(28, "No space left on device")

    with records:
        records.write(1, rows())
    assert not records.takes(2)
    assert list(tmp_path.iterdir()) == []  # half a step is no record of it
    with records:
        raise ValueError("a second one is not told")
    assert caplog.text.count("stops recording") == 1
    assert "OSError [Errno 28] No space left on device" in caplog.text


def test_a_step_that_ctrl_c_ends_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(recorder.atexit, "register", lambda call, **how: at_exit.append(partial(call, **how)))
    records = Recorder(tmp_path, "TRL")

    def rows() -> Any:
        yield row(2)
        raise KeyboardInterrupt

    with records:
        records.write(1, iter([row(1)]))
    with pytest.raises(KeyboardInterrupt), records:
        records.write(2, rows())
    assert records.is_on
    for call in at_exit:
        call()
    assert [file.name for file in tmp_path.iterdir()] == ["step_000001.rank_0.jsonl"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    records = Recorder(tmp_path / "file" / "tokens", "TRL")
    with records:
        records.write(1, iter([row(1)]))
    assert not records.is_on


def test_only_errors_are_swallowed(tmp_path: Path) -> None:
    records = Recorder(tmp_path, "TRL")
    with pytest.raises(KeyboardInterrupt), records:
        raise KeyboardInterrupt


def test_rows_are_cut_to_their_tokens(tmp_path: Path) -> None:
    keep = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])  # at the left, none, at the right
    values = torch.arange(9.0).view(3, 3).requires_grad_()
    rows = list(rows_of(keep, {"entropy": values, "value": None}, score=[1.0, 2.0, 3.0], version=None))
    assert [entry["entropy"].tolist() for entry in rows] == [[0.0, 1.0], [7.0, 8.0]]
    assert [entry["score"] for entry in rows] == [1.0, 3.0]
    assert all(entry.keys() == {"entropy", "score"} for entry in rows)
    assert [ids.tolist() for ids in masked_rows(values, keep)] == [[0.0, 1.0], [], [7.0, 8.0]]


def test_prompts_of_rows_without_tokens_do_not_shift(tmp_path: Path) -> None:
    keep = torch.tensor([[0, 0], [1, 0]])
    (only,) = rows_of(keep, {"response_ids": torch.tensor([[7, 8], [5, 9]])}, prompt_ids=[[1], [2, 3]])
    assert (only["prompt_ids"], only["response_ids"].tolist()) == ([2, 3], [5])


def test_values_stay_whole_numbers(tmp_path: Path) -> None:
    records = Recorder(tmp_path, "TRL")
    entry = row(1, response_ids=torch.tensor([3, 4]), finished=torch.tensor(True), version=torch.tensor(7))
    with records:
        records.write(1, iter([entry]))
    records.close()
    facts, line = (
        json.loads(text) for text in (tmp_path / "step_000001.rank_0.jsonl").read_text().splitlines()
    )
    assert facts == {"token_record": 1, "trainer": "TRL"}
    assert (line["response_ids"], line["finished"], line["version"]) == ([3, 4], True, 7)


def test_the_recorded_example_is_of_a_cooler_engine() -> None:
    source = token_source(Path(__file__).parents[4] / "docs" / "examples" / "trl_temperature.jsonl")
    assert source is not None
    assert (source.trainer, source.steps) == ("TRL", list(range(1, 11)))
    records = list(source.records())
    assert {len(record.lengths) for record in records} == {16}
    assert all(record.facts["temperature"] == 1.0 for record in records)  # what its configuration says
    logs = np.concatenate([record.log_ratio() for record in records])
    surprise = np.concatenate([r.tokens["old_log_prob"] + r.tokens["entropy"] for r in records])
    assert np.polyfit(surprise, logs, 1)[0] == pytest.approx(1 - 1 / 0.9, abs=1e-3)
