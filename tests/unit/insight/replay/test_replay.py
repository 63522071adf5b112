"""Replays of recorded tokens: what is measured is what a plain model computes, and a planted fault is the one
that is named."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_tokens import token_record, write_tokens
from small_checkpoints import STEP, write_checkpoint, write_tiny_model
from small_models import small_run_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_rc.algorithm.health.cause_table import OLDER_WEIGHTS, OTHER_INPUTS
from verl_rc.config.load import save_resolved_config
from verl_rc.insight.diagnosis import DiagnosisRequest, diagnose
from verl_rc.insight.replay.diagnosis import diagnose_with_replays
from verl_rc.insight.replay.rows import NothingToReplayError
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict import verdict_of
from verl_rc.records.token_records.token_parquet import read_record, record_files, write_record
from verl_rc.records.token_records.token_record import FOLDER
from verl_rc.runtime.checkpoint import CheckpointStore
from verl_rc.runtime.workers.export import export_checkpoint

BOTH = ("R0", "R3")
LENGTHS = (7, 3, 5, 6)
PROMPTS = [[49, 50, 51, 52][: 1 + row % 4] for row in range(len(LENGTHS))]
RESPONSES = [
    [48 + (3 * row + position) % 10 for position in range(length)] for row, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model that a run began with, a checkpoint of its step 3, and that as a model folder."""
    place = tmp_path_factory.mktemp("kept")
    base = write_tiny_model(place / "base")
    store = CheckpointStore(place / "run", most=None)
    write_checkpoint(small_run_config(base), store.begin(STEP))
    store.seal(STEP)
    store.commit(STEP)
    export_checkpoint(place / "run" / f"global_step_{STEP}", place / "later")
    return {"base": base, "run": place / "run", "later": place / "later"}


def log_probs(model_folder: Path, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Of every response token, row by row, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    found: list[float] = []
    for prompt, response in zip(prompts, RESPONSES, strict=True):
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([[*prompt, *response]])).logits[0]
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found += rows.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
    return found


def run_with(
    kept: dict[str, Path],
    train: Sequence[float] | None,
    rollout: Sequence[float],
    steps: Sequence[int] = (4,),
) -> Path:
    """The run's folder with these log-probs recorded, by weights that are said to be of version 3."""
    folder = kept["run"]
    save_resolved_config(small_run_config(kept["base"]), folder)
    for path in folder.glob("tokens/*"):
        path.unlink()
    (folder / "diagnosis.json").unlink(missing_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 4, "actor/grad_norm": 1.0}\n')
    records = [
        token_record(
            step,
            LENGTHS,
            prompts=[np.array(prompt) for prompt in PROMPTS],
            response_ids=np.concatenate([np.array(response) for response in RESPONSES]),
            old_log_prob=None if train is None else np.array(train, "float32"),
            rollout_log_prob=np.array(rollout, "float32"),
            version=np.full(sum(LENGTHS), STEP),
            facts={"current_version": STEP},
        )
        for step in steps
    ]
    write_tokens(folder, records)
    return folder


def noisy(values: Sequence[float], size: float = 0.01) -> list[float]:
    return [value + size * (-1) ** place for place, value in enumerate(values)]


def test_a_healthy_run_is_reproduced_and_no_fault_is_named(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    found = diagnose_with_replays(DiagnosisRequest(run_with(kept, train, noisy(train)), BOTH))
    (record,) = found.replayed
    assert record.tokens == sum(LENGTHS)
    assert record.gap == pytest.approx(0.01, rel=1e-3)
    assert record.trainer < 1e-5
    assert record.versions[STEP] == pytest.approx(0.01, rel=1e-2)
    before = log_probs(kept["base"], PROMPTS)
    expected = np.sqrt(np.mean((np.array(before) - np.array(noisy(train))) ** 2))
    assert record.versions[0] == pytest.approx(expected, rel=1e-4)
    assert record.trainer_twice == 0
    assert not [one for one in found.statements if one.level == "fault"]
    assert any("trainer again 0.0000 (" in line and "nearest weights 3" in line for line in found.lines())


def test_what_was_replayed_before_is_kept_until_its_step_is_made_again(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, noisy(train), steps=(4, 5))
    diagnose_with_replays(DiagnosisRequest(folder, ("R3",)))
    found = diagnose_with_replays(DiagnosisRequest(folder, ("R0",), first_step=5)).replayed
    assert [(one.step, sorted(one.versions)) for one in found] == [(5, [0, STEP])]
    later = time.time() + 60
    os.utime(next(path for step, path in record_files(folder / FOLDER) if step == 4), (later, later))
    found = diagnose_with_replays(DiagnosisRequest(folder, ("R0",), first_step=5)).replayed
    assert [one.step for one in found] == [5]
    assert [one["step"] for one in json.loads((folder / "diagnosis.json").read_text())["replayed"]] == [5]


def test_old_weights_are_found_and_stand_in_the_report(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, noisy(log_probs(kept["base"], PROMPTS)), steps=(4, 5))
    found = diagnose_with_replays(DiagnosisRequest(folder, BOTH))
    assert (found.statements[0].cause, found.statements[0].confidence) == (OLDER_WEIGHTS.name, "named")
    assert found.statements[0].evidence["nearest_version"] == 0
    assert [one.best_version for one in found.replayed] == [0, 0]
    assert json.loads((folder / "diagnosis.json").read_text())["statements"][0]["cause"] == OLDER_WEIGHTS.name
    assert OLDER_WEIGHTS.name in [one.cause for one in verdict_of(read_run(folder)).statements]


def test_a_prompt_that_the_trainer_cuts_is_not_reproduced(kept: dict[str, Path]) -> None:
    right, cut = log_probs(kept["later"], PROMPTS), [prompt[1:] or prompt for prompt in PROMPTS]
    train = log_probs(kept["later"], cut)
    (record, *_), (first, *_) = (
        getattr(diagnose_with_replays(DiagnosisRequest(run_with(kept, train, noisy(right)), ("R0",))), name)
        for name in ("replayed", "statements")
    )
    assert first.cause == OTHER_INPUTS.name
    difference, gap = np.array(train) - np.array(right), np.array(train) - np.array(noisy(right))
    assert record.trainer == pytest.approx(np.sqrt(np.mean(difference**2)), rel=1e-4)
    assert record.share == pytest.approx(np.cov(difference, gap, bias=True)[0, 1] / gap.var(), rel=1e-4)
    assert record.versions == {}  # R3 was not asked for


def test_where_the_actor_corrects_the_weights_are_still_compared(kept: dict[str, Path]) -> None:
    found = diagnose_with_replays(
        DiagnosisRequest(run_with(kept, None, noisy(log_probs(kept["base"], PROMPTS))), BOTH)
    )
    assert (found.replayed[0].trainer, found.replayed[0].share) == (0.0, 0.0)
    assert found.statements[0].cause == OLDER_WEIGHTS.name


def test_what_is_missing_is_said(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, train)
    for path in (folder / "tokens").glob("*.parquet"):
        path.unlink()
    with pytest.raises(NothingToReplayError, match=r"trainer\.token_records\.contents=full"):
        diagnose_with_replays(DiagnosisRequest(folder, ("R0",)))
    without = diagnose(DiagnosisRequest(folder))
    assert without.replayed == ()
    assert "R3 (the trainer with each version" in without.notes[-1]


@pytest.mark.parametrize("facts", [{"top_p": 1.0, "top_k": 20}, {"router_replay": True}])
def test_records_of_log_probs_that_are_given_the_engine_s_choices_are_not_replayed(
    kept: dict[str, Path], facts: dict[str, Any]
) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, train)
    for _, path in record_files(folder / "tokens"):
        record = read_record(path)
        write_record(path.parent, replace(record, facts={**record.facts, **facts}))
    with pytest.raises(NothingToReplayError, match="neither supports nor experts"):
        diagnose_with_replays(DiagnosisRequest(folder, ("R0",)))


def test_records_of_rows_with_pictures_are_not_replayed(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, train)
    for _, path in record_files(folder / "tokens"):
        record = read_record(path)
        pictures = np.full(len(record.lengths), "a" * 64, dtype=object)
        write_record(path.parent, replace(record, rows={**record.rows, "pictures": pictures}))
    with pytest.raises(NothingToReplayError, match="replays read no pictures"):
        diagnose_with_replays(DiagnosisRequest(folder, ("R0",)))
