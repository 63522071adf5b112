"""Replays of recorded tokens: what is measured is what a plain model computes, and a planted fault is the one that is named."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_tokens import token_record, write_tokens
from small_checkpoints import STEP, write_checkpoint, write_tiny_model
from small_models import small_run_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_rc.checkpoint import CheckpointStore
from verl_rc.config.load import save_resolved_config
from verl_rc.driver.replay import DiagnosisRequest, NothingToReplayError, diagnose
from verl_rc.report.run_folder import read_run
from verl_rc.report.verdict import judge
from verl_rc.report.verdict.replays import OLDER_WEIGHTS, OTHER_INPUTS
from verl_rc.workers.export import ExportRequest, export_checkpoint

TRAINER = ("R0", "R1", "R2", "R3", "R4")
LENGTHS = (7, 3, 5, 6)
PROMPTS = [[49, 50, 51, 52][: 1 + row % 4] for row in range(len(LENGTHS))]
RESPONSES = [[48 + (3 * row + position) % 10 for position in range(length)] for row, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model that a run began with, a checkpoint of its step 3, and that as a model folder."""
    place = tmp_path_factory.mktemp("kept")
    base = write_tiny_model(place / "base")
    store = CheckpointStore(place / "run", keep=None)
    write_checkpoint(small_run_config(base), store.begin(STEP))
    store.seal(STEP)
    store.commit(STEP)
    export_checkpoint(ExportRequest(place / "run" / f"global_step_{STEP}", place / "later"))
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


def run_with(kept: dict[str, Path], train: Sequence[float] | None, rollout: Sequence[float], steps: Sequence[int] = (4,)) -> Path:
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
    found = diagnose(DiagnosisRequest(run_with(kept, train, noisy(train)), TRAINER))
    (record,) = found.replayed
    assert record.tokens == sum(LENGTHS)
    assert record.gap == pytest.approx(0.01, rel=1e-3)
    assert record.parts["trainer"].size < 1e-5
    assert record.parts["engine"].size == pytest.approx(0.01, rel=1e-2)
    assert record.parts["engine"].share == pytest.approx(1.0, abs=1e-2)
    assert record.versions[STEP] == pytest.approx(0.01, rel=1e-2)
    before = log_probs(kept["base"], PROMPTS)
    expected = np.sqrt(np.mean((np.array(before) - np.array(noisy(train))) ** 2))
    assert record.versions[0] == pytest.approx(expected, rel=1e-4)
    assert record.numbers["trainer_twice"] == 0
    assert record.numbers["alone"] < 1e-5
    assert not [one for one in found.statements if one.level == "fault"]
    assert set(found.seconds) == set(TRAINER)


def test_old_weights_are_found_and_stand_in_the_report(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, noisy(log_probs(kept["base"], PROMPTS)), steps=(4, 5))
    found = diagnose(DiagnosisRequest(folder, TRAINER))
    assert (found.statements[0].cause, found.statements[0].confidence) == (OLDER_WEIGHTS, "named")
    assert found.statements[0].evidence["held"] == 0
    assert [one.best_version for one in found.replayed] == [0, 0]
    assert json.loads((folder / "diagnosis.json").read_text())["statements"][0]["cause"] == OLDER_WEIGHTS
    assert OLDER_WEIGHTS in [one.cause for one in judge(read_run(folder)).statements]


def test_a_prompt_that_the_trainer_cuts_is_named_with_the_mistake(kept: dict[str, Path]) -> None:
    right, cut = log_probs(kept["later"], PROMPTS), [prompt[1:] or prompt for prompt in PROMPTS]
    found = diagnose(DiagnosisRequest(run_with(kept, log_probs(kept["later"], cut), noisy(right)), TRAINER))
    assert found.statements[0].cause == OTHER_INPUTS
    assert "prompts without their first token" in found.statements[0].sentence


def test_where_the_actor_corrects_the_weights_are_still_compared(kept: dict[str, Path]) -> None:
    found = diagnose(DiagnosisRequest(run_with(kept, None, noisy(log_probs(kept["base"], PROMPTS))), TRAINER))
    assert "trainer" not in found.replayed[0].parts
    assert found.statements[0].cause == OLDER_WEIGHTS


def test_what_is_missing_is_said(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, train)
    for path in (folder / "tokens").glob("*.parquet"):
        path.unlink()
    with pytest.raises(NothingToReplayError, match=r"trainer\.token_records\.contents=full"):
        diagnose(DiagnosisRequest(folder, ("R0",)))
    without = diagnose(DiagnosisRequest(folder))
    assert without.replayed == ()
    assert "R3 (the trainer with each version" in without.notes[0]
