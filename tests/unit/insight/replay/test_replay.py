"""Replays of recorded tokens: what is measured is what a plain model computes, and a planted fault is the one
that is named."""

import json
import os
import shutil
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

from verl_rc.checkpoint import CheckpointStore
from verl_rc.config.load import save_resolved_config
from verl_rc.data.token_parquet import read_record, record_files, write_record
from verl_rc.data.token_record import FOLDER
from verl_rc.health.cause_table import (
    ENGINES_INPUTS,
    LARGER_THAN_HEALTHY,
    OLDER_WEIGHTS,
    OTHER_CODE,
    OTHER_INPUTS,
    OTHER_OPERATION,
    STALE_CACHE,
)
from verl_rc.insight.diagnosis import DiagnosisRequest, diagnose
from verl_rc.insight.replay import diagnosis
from verl_rc.insight.replay.diagnosis import diagnose_with_replays
from verl_rc.insight.replay.operations import Divergence
from verl_rc.insight.replay.rows import NothingToReplayError, RecordedRows
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict import judge
from verl_rc.workers.export import export_checkpoint

TRAINER = ("R0", "R1", "R2", "R3", "R4")
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
    store = CheckpointStore(place / "run", keep=None)
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
    found = diagnose_with_replays(DiagnosisRequest(run_with(kept, train, noisy(train)), TRAINER))
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


def test_a_gap_of_more_than_this_precision_makes_is_to_be_looked_at(kept: dict[str, Path]) -> None:
    """The engine is float32 here, which makes none; the healthy run above stays below what counts."""
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, noisy(train, 0.01))
    statements = diagnose_with_replays(DiagnosisRequest(folder, ("R2",))).statements
    assert [one.cause for one in statements if one.level == "notice"] == [LARGER_THAN_HEALTHY.name]
    assert LARGER_THAN_HEALTHY.name in judge(read_run(folder)).code  # the report knows it from then on
    folder = run_with(kept, train, noisy(train, 0.001))
    statements = diagnose_with_replays(DiagnosisRequest(folder, ("R2",))).statements
    assert not [one.cause for one in statements if one.level in ("notice", "fault")]


def test_what_was_replayed_before_is_kept_until_its_step_is_made_again(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, noisy(train), steps=(4, 5))
    diagnose_with_replays(DiagnosisRequest(folder, ("R1",)))
    found = diagnose_with_replays(DiagnosisRequest(folder, ("R2",), first_step=5)).replayed
    assert [(one.step, {"alone", "precision"} <= one.numbers.keys()) for one in found] == [(5, True)]
    later = time.time() + 60
    os.utime(next(path for step, path in record_files(folder / FOLDER) if step == 4), (later, later))
    found = diagnose_with_replays(DiagnosisRequest(folder, ("R4",), first_step=5)).replayed
    assert [one.step for one in found] == [5]
    assert [one["step"] for one in json.loads((folder / "diagnosis.json").read_text())["replayed"]] == [5]


def test_old_weights_are_found_and_stand_in_the_report(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, noisy(log_probs(kept["base"], PROMPTS)), steps=(4, 5))
    found = diagnose_with_replays(DiagnosisRequest(folder, TRAINER))
    assert (found.statements[0].cause, found.statements[0].confidence) == (OLDER_WEIGHTS.name, "named")
    assert found.statements[0].evidence["nearest_version"] == 0
    assert [one.best_version for one in found.replayed] == [0, 0]
    assert json.loads((folder / "diagnosis.json").read_text())["statements"][0]["cause"] == OLDER_WEIGHTS.name
    assert OLDER_WEIGHTS.name in [one.cause for one in judge(read_run(folder)).statements]


def test_a_prompt_that_the_trainer_cuts_is_named_with_the_mistake(kept: dict[str, Path]) -> None:
    right, cut = log_probs(kept["later"], PROMPTS), [prompt[1:] or prompt for prompt in PROMPTS]
    found = diagnose_with_replays(
        DiagnosisRequest(run_with(kept, log_probs(kept["later"], cut), noisy(right)), TRAINER)
    )
    assert found.statements[0].cause == OTHER_INPUTS.name
    assert "prompts without their first token" in found.statements[0].sentence


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([prompt[1:] or prompt for prompt in PROMPTS], "prompts without their first token"),
        ([[prompt[0], *prompt] for prompt in PROMPTS], "the first token of prompts twice"),
    ],
)
def test_prompts_that_the_engine_was_not_to_be_given_are_named(
    kept: dict[str, Path], given: Sequence[Sequence[int]], said: str
) -> None:
    train = log_probs(kept["later"], PROMPTS)
    found = diagnose_with_replays(
        DiagnosisRequest(run_with(kept, train, noisy(log_probs(kept["later"], given), 1e-4)), TRAINER)
    )
    assert found.statements[0].cause == ENGINES_INPUTS.name
    assert said in found.statements[0].sentence


def test_where_the_actor_corrects_the_weights_are_still_compared(kept: dict[str, Path]) -> None:
    found = diagnose_with_replays(
        DiagnosisRequest(run_with(kept, None, noisy(log_probs(kept["base"], PROMPTS))), TRAINER)
    )
    assert "trainer" not in found.replayed[0].parts
    assert found.statements[0].cause == OLDER_WEIGHTS.name


class TableEngine:
    """Stands for ``ReplayEngine``: its log-probs are the recorded ones and so many nats more, in turn with
    either sign."""

    PLAIN, PREFILL, OWN_CACHE, STALE_CACHE = 0.4, 0.3, 0.2, 0.002

    def __init__(self, config: object, folder: str, plain: bool = False, caches: bool = False) -> None:
        self._size = self.PLAIN if plain else self.PREFILL
        assert not (plain and caches)

    def prefilled(self, rows: RecordedRows, folder: str) -> Tensor:
        return self._moved(rows, self._size)

    def decoded(self, rows: RecordedRows, folder: str, cached_by: str | None = None) -> tuple[Tensor, int]:
        return self._moved(rows, self.OWN_CACHE if cached_by is None else self.STALE_CACHE), 64

    def close(self) -> None:
        pass

    def _moved(self, rows: RecordedRows, size: float) -> Tensor:
        return rows.rollout + size * (-1.0) ** torch.arange(rows.rollout.shape[1])


def test_parts_of_engines_stand_between_trainer_and_record(
    kept: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "ReplayEngine", TableEngine)
    train = np.array(log_probs(kept["later"], PROMPTS))
    signs = np.concatenate([(-1.0) ** np.arange(length) for length in LENGTHS])
    folder = run_with(kept, train.tolist(), (train - 0.5 * signs).tolist())
    (record,) = diagnose_with_replays(DiagnosisRequest(folder, ("R0", "R5", "R6", "R7"))).replayed
    expected = {"engine": 0.1, "precision": 0.1, "decode": 0.1, "rest": 0.2}
    for name, size in expected.items():
        assert record.parts[name].size == pytest.approx(size, abs=1e-5), name
        assert record.parts[name].share == pytest.approx(size / 0.5, abs=1e-4), name
    numbers = {
        "kernels": 0.1,
        "own_cache": 0.2,
        "stale_cache": 0.002,
        "stale_version": 0,
        "cached_tokens": 64,
    }
    assert {name: record.numbers[name] for name in numbers} == pytest.approx(numbers, abs=1e-5)
    of_replays = {
        "R5": {"engine": 0.2, "rest": 0.3},
        "R6": {"engine": 0.1, "precision": 0.4},
        "R7": {"engine": 0.3, "rest": 0.2},
    }
    for name, sizes in of_replays.items():
        (folder / "diagnosis.json").unlink()
        (record,) = diagnose_with_replays(DiagnosisRequest(folder, ("R0", name))).replayed
        found = {
            part: record.parts[part].size for part in record.parts if part not in ("trainer", "versions")
        }
        assert found == pytest.approx(sizes, abs=1e-5), name


def test_a_stale_cache_and_other_code_are_named(
    kept: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "ReplayEngine", TableEngine)
    train = np.array(log_probs(kept["later"], PROMPTS))
    signs = np.concatenate([(-1.0) ** np.arange(length) for length in LENGTHS])
    found = diagnose_with_replays(
        DiagnosisRequest(run_with(kept, train.tolist(), (train - 0.5 * signs).tolist()), ("R6", "R7"))
    )
    assert [one.cause for one in found.statements if one.level == "fault"] == [
        STALE_CACHE.name,
        OTHER_CODE.name,
    ]
    assert "filled by weights 0" in found.statements[0].sentence


def test_engines_that_are_given_tokens_need_temperature_1(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, train)
    save_resolved_config(small_run_config(kept["base"], "actor_rollout_ref.rollout.temperature=0.7"), folder)
    found = diagnose_with_replays(DiagnosisRequest(folder, ("R6", "R7")))
    assert found.notes == ("R6, R7 left out: engines that are given tokens score them at temperature 1",)


@pytest.mark.parametrize(
    ("found", "causes", "note"),
    [
        (Divergence("embed", "model.norm", 0.2, 0.003), [OTHER_OPERATION.name], ""),
        (Divergence("embed"), [], "than rounding makes; the first that differs at all is embed"),
        (Divergence(), [], "than rounding makes; all are equal"),
    ],
)
def test_an_engine_that_only_rounds_is_a_note_and_another_operation_a_fault(
    found: Divergence,
    causes: list[str],
    note: str,
    kept: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis, "find_divergence", lambda config, folder, prompts: found)
    train = log_probs(kept["later"], PROMPTS)
    said = diagnose_with_replays(DiagnosisRequest(run_with(kept, train, noisy(train)), ("R8",)))
    assert [one.cause for one in said.statements if one.level == "fault"] == causes
    assert [one.endswith(note) for one in said.notes] == [True] * bool(note)


def test_operations_behind_quantised_weights_are_not_compared(kept: dict[str, Path]) -> None:
    train = log_probs(kept["later"], PROMPTS)
    folder = run_with(kept, train, train)
    quantised = "actor_rollout_ref.rollout.quantization=fp8_per_channel"
    save_resolved_config(small_run_config(kept["base"], quantised), folder)
    found = diagnose_with_replays(DiagnosisRequest(folder, ("R8",)))
    assert found.notes == ("R8 left out: it knows engines on a CPU, without quantisation",)


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
    with pytest.raises(NothingToReplayError, match="neither sets of kept tokens nor experts"):
        diagnose_with_replays(DiagnosisRequest(folder, ("R0",)))


def test_the_engine_s_precision_is_that_of_a_model_loaded_in_it(
    kept: dict[str, Path], tmp_path: Path
) -> None:
    """Casting a loaded model would round its rotary frequencies, too: at position 600 by a radian."""
    length = 600
    response = torch.tensor([48 + (7 * position**2) % 10 for position in range(length)])
    folder = shutil.copytree(kept["base"], tmp_path / "attentive")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weights *= 20
    model.save_pretrained(folder)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            logits: Tensor = model(torch.cat([torch.tensor([49]), response])[None]).logits[0, :-1].float()
        scores.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    exact = scores[0].numpy()
    config = small_run_config(folder, "actor_rollout_ref.rollout.dtype=bfloat16")
    (tmp_path / "run").mkdir()
    save_resolved_config(config, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "actor/grad_norm": 1.0}\n')
    record = token_record(
        1,
        (length, 1),  # the second row is the worst one
        prompts=[np.array([49])] * 2,
        response_ids=np.append(response.numpy(), 48),
        old_log_prob=np.append(exact, -1.0).astype("float32"),
        rollout_log_prob=np.append(exact, -1.0).astype("float32"),
    )
    write_tokens(tmp_path / "run", [record])
    found = diagnose_with_replays(DiagnosisRequest(tmp_path / "run", ("R2",), rows=1))
    expected = float((scores[1] - scores[0]).square().mean().sqrt())
    assert found.replayed[0].numbers["precision"] == pytest.approx(expected, rel=0.2)
