"""``verl-rc diagnose RUN --model FOLDER``: the first recorded step of another trainer's run, scored again
with the model that it began with.

Needs torch and transformers alone, in the versions that are installed beside that trainer.
"""

import inspect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_rc.config.models import torch_name
from verl_rc.data.token_record import PROMPTS, Array, TokenRecord
from verl_rc.data.token_rows import record_of_rows, rows_of
from verl_rc.health.cause_table import CAUSES
from verl_rc.health.causes import PREFIX, cause_of, signature_statement
from verl_rc.health.statement import Statement
from verl_rc.insight.diagnosis import Diagnosis, DiagnosisRequest, diagnosis_of
from verl_rc.insight.replay.mistakes import Mistakes, wrong_prompts
from verl_rc.insight.run_folder import ReplayedRecord, RunData, read_run, token_source
from verl_rc.insight.run_folder.token_metrics import metrics_of
from verl_rc.insight.run_folder.trainers.options import RECORDINGS
from verl_rc.insight.verdict.diagnosis import with_replays
from verl_rc.insight.verdict.healthy_gap import HEALTHY
from verl_rc.insight.verdict.replays import parts_of, rms
from verl_rc.metrics.bounds import BOUNDS

_FIRST_STEPS = (0, 1)
"""Numbers that trainers give the step before the first update."""
_PRECISIONS = ("float32", "bfloat16", "float16")
_ASSUMED = "bfloat16"
"""Precision of a trainer or engine that is not known: the widest rounding that is usual."""
_MOST_LOGITS = 1 << 30
"""Numbers; rows whose logits would be more are left out."""


_PARTS = {"trainer": "trainer", "engine": "rest"}
"""Part of the gap that separates the recorded log-probs of a side from the model's."""


class _NotAskedError(ValueError):
    """The run lacks what its replay needs; the message says what."""


@dataclass(frozen=True)
class _Policies:
    """In what precision and at which temperature trainer and engine computed."""

    temperature: float
    engine_temperature: float
    """1 where it reports raw log-probs."""
    trainer_dtype: str
    engine_dtype: str


def diagnose_with_model(request: DiagnosisRequest) -> Diagnosis:
    """Judge the gap of another trainer's run from its records, and from the first recorded step with
    ``request.model``.

    Raises:
        ValueError: the folder holds no run, or one of verl_rc; there is no such model.
    """
    run = read_run(request.folder, request.first_step, request.last_step)
    if run.is_own:
        raise ValueError(f"{request.folder} must be a run of another trainer; one of verl_rc has --replay.")
    if request.model is None or not request.model.is_dir():
        raise ValueError(f"--model must be a model folder, got {request.model}.")
    diagnosis, began = diagnosis_of(run), time.monotonic()
    notes = [
        "not asked with a model alone: older weights (R3), an engine built as the run's was (R5, R6, R7)"
    ]
    try:
        record = _first_record(run, request)
        policies = _policies(record.facts, request, notes)
        replayed, filled = _replay(record, request.model, policies, request.rows, notes)
        _check_model(replayed, request.model, policies)
    except _NotAskedError as error:
        return replace(diagnosis, notes=(f"not replayed: {error}", *diagnosis.notes))
    notes += _in_words(replayed, policies)
    statements = diagnosis.statements
    if _is_reproduced(replayed, "trainer"):
        statements = _with_filled(statements, filled, policies)
    return replace(
        diagnosis,
        statements=tuple(with_replays(run, statements, [replayed])),
        replayed=(replayed,),
        seconds={"the model": time.monotonic() - began},
        notes=(*notes, *diagnosis.notes),
    )


def _first_record(run: RunData, request: DiagnosisRequest) -> TokenRecord:
    source = token_source(request.folder)
    records = () if source is None else source.records(request.first_step, request.last_step)
    record = next(iter(records), None)
    if record is None:
        recording = RECORDINGS.get(run.trainer)
        raise _NotAskedError(
            "the run has no token records" + (f"; to record them: {recording.option}" if recording else "")
        )
    if record.prompts is None or "response_ids" not in record.tokens:
        raise _NotAskedError("the token records must hold ids of prompts and responses")
    if record.step not in _FIRST_STEPS and not request.first_step:
        raise _NotAskedError(
            f"the first recorded step is {record.step}, whose weights are not those that the run began with. "
            f"With the weights before that step: --model FOLDER --steps {record.step}-{record.step}"
        )
    return record


def _policies(facts: Mapping[str, Any], request: DiagnosisRequest, notes: list[str]) -> _Policies:
    temperature = facts.get("temperature") if request.temperature is None else request.temperature
    if not isinstance(temperature, int | float) or not temperature > 0:
        raise _NotAskedError("the temperature of sampling is not in the run's files: --temperature T says it")
    dtypes = []
    for name, option in zip(("trainer_dtype", "engine_dtype"), request.dtypes or ("", ""), strict=True):
        dtype = torch_name(option or str(facts.get(name, "")))
        if dtype not in _PRECISIONS:
            notes.append(f"{name} is not in the run's files, {_ASSUMED} is assumed: --dtypes TRAINER,ENGINE")
            dtype = _ASSUMED
        dtypes.append(dtype)
    is_raw = str(facts.get("logprobs_mode", "")).startswith("raw")
    return _Policies(float(temperature), 1.0 if is_raw else float(temperature), *dtypes)


_Ids = Sequence[Sequence[int]]
"""Token ids of each row."""


class _Model:
    """The model in one precision."""

    def __init__(self, folder: Path, dtype: str) -> None:
        # transformers before 4.56 does not know this argument as ``dtype``.
        model = AutoModelForCausalLM.from_pretrained(str(folder), torch_dtype=getattr(torch, dtype)).eval()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device)
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def padding(self) -> int:
        """Id of the padding token, or else of EOS."""
        ids = (self._model.config.pad_token_id, self._model.config.eos_token_id, 0)
        return next(token_id for token_id in ids if isinstance(token_id, int))

    def fields(self, prompts: _Ids, responses: _Ids, temperature: float) -> list[dict[str, Array]]:
        """Fields of a token record that tell the trainer's distributions, for each row."""
        rows = []
        for log_probs, token_log_probs in self._distributions(prompts, responses, temperature):
            probs = log_probs.exp()
            entropy = -(probs * log_probs).sum(-1)
            fields = {
                "old_log_prob": token_log_probs,
                "entropy": entropy,
                "sum_pi_squared": probs.square().sum(-1),
                "varentropy": (probs * (log_probs + entropy[:, None]).square()).sum(-1),
            }
            rows.append({name: values.cpu().numpy() for name, values in fields.items()})
        return rows

    def log_probs(self, prompts: _Ids, responses: _Ids, temperature: float) -> Array:
        """float32 ``[tokens]``, nats: log-probs of all responses, one behind the other."""
        rows = self._distributions(prompts, responses, temperature)
        return np.concatenate([token_log_probs.cpu().numpy() for _, token_log_probs in rows])

    def _distributions(
        self, prompts: _Ids, responses: _Ids, temperature: float
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield of each row the log-probs of the vocabulary ``[R, V]`` and of its tokens ``[R]``."""
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor([[*prompt, *response]], device=self._device)
            limit = {"logits_to_keep": len(response) + 1} if self._keeps_some_logits else {}
            with torch.no_grad():
                logits = self._model(ids, use_cache=False, **limit).logits[0]
            log_probs = (logits[-len(response) - 1 : -1].float() / temperature).log_softmax(-1)
            yield log_probs, log_probs.gather(-1, ids[0, -len(response) :, None])[:, 0]


def _replay(
    record: TokenRecord, folder: Path, policies: _Policies, most_rows: int, notes: list[str]
) -> tuple[ReplayedRecord, TokenRecord]:
    """The measurements, like those of a run of verl_rc; and the replayed rows. Where the rows lack fields of
    the trainer's distributions, the model in float32 fills them."""
    dtypes = ("float32", policies.trainer_dtype, policies.engine_dtype)
    models = {dtype: _Model(folder, dtype) for dtype in dict.fromkeys(dtypes)}
    exact_model = models["float32"]
    rows = _scorable(record, exact_model.vocabulary, most_rows, notes)
    prompts, responses = ([row[name].tolist() for row in rows] for name in (PROMPTS, "response_ids"))
    fields = exact_model.fields(prompts, responses, policies.temperature)
    filled = [{**computed, **row} for computed, row in zip(fields, rows, strict=True)]
    filled_record = record_of_rows(record.facts, record.step, filled)

    # Log-probs of the rows, one behind the other, by precision and temperature.
    trainer_policy = (policies.trainer_dtype, policies.temperature)
    engine_policy = (policies.engine_dtype, policies.engine_temperature)
    scores = {("float32", policies.temperature): _column(fields, "old_log_prob")}
    for dtype, temperature in (trainer_policy, engine_policy, ("float32", policies.engine_temperature)):
        if (dtype, temperature) not in scores:
            scores[dtype, temperature] = models[dtype].log_probs(prompts, responses, temperature)
    trainer, engine = scores[trainer_policy], scores[engine_policy]
    longest = max(map(len, record.prompts or prompts))
    mistaken = {
        mistake: models[policies.trainer_dtype].log_probs(mistaken_prompts, responses, policies.temperature)
        for mistake, mistaken_prompts in wrong_prompts(prompts, longest, exact_model.padding)
    }
    rollout = filled_record.tokens["rollout_log_prob"]
    counted = filled_record.tokens["response_mask"] & np.isfinite(rollout)
    recorded = _column(rows, "old_log_prob") if "old_log_prob" in record.tokens else None
    if recorded is not None:
        counted &= np.isfinite(recorded)

    def distance(first: Array, second: Array) -> float:
        return rms((first.astype("float64") - second)[counted])

    chain = [("precision", trainer), ("rest", engine)]
    if recorded is not None:
        chain.insert(0, ("trainer", recorded))
    parts = parts_of([(name, values[counted]) for name, values in chain], rollout[counted])
    # Mistakes are scored at the trainer's temperature, raw log-probs are at temperature 1.
    reported = rollout if policies.engine_temperature == policies.temperature else None
    mistakes = Mistakes.from_scores(distance, trainer, mistaken, recorded, reported)
    rounding = distance(trainer, scores["float32", policies.temperature])
    engine_rounding = distance(engine, scores["float32", policies.engine_temperature])
    replayed = ReplayedRecord(
        record.step,
        version=0,
        tokens=int(counted.sum()),
        gap=distance(chain[0][1], rollout),
        parts=parts,
        versions={0: distance(trainer, rollout)},
        numbers={
            "precision": parts["precision"].size,
            "noise": BOUNDS.far_above_floor * rounding,
            "engine_rounding": engine_rounding,
            HEALTHY: math.hypot(rounding, engine_rounding),
            **mistakes.numbers,
        },
        reproduced_by=mistakes.trainer,
        engine_reproduced_by=mistakes.engine,
    )
    return replayed, filled_record


def _scorable(record: TokenRecord, vocabulary: int, most_rows: int, notes: list[str]) -> list[dict[str, Any]]:
    """At most ``most_rows`` rows of a record that were drawn at random and can be scored."""
    rows = [row for row in rows_of(record) if row["chosen_by"] == "random" and len(row["response_ids"])]
    scorable = [
        row
        for row in rows
        if len(row[PROMPTS]) and (len(row["response_ids"]) + 1) * vocabulary <= _MOST_LOGITS
    ]
    if not scorable:
        raise _NotAskedError("no row of the step has a prompt and a response that is short enough")
    if len(scorable) < len(rows):
        notes.append(f"{len(rows) - len(scorable)} rows without a prompt, or too long, are not replayed")
    largest = max(int(ids.max()) for row in scorable for ids in (row[PROMPTS], row["response_ids"]))
    if largest >= vocabulary:
        raise _NotAskedError(
            f"the records have ids up to {largest:,}, and the model knows {vocabulary:,}: it is another model"
        )
    return scorable[:most_rows]


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Array:
    column: Array = np.concatenate([row[name] for row in rows])
    return column


def _check_model(replayed: ReplayedRecord, folder: Path, policies: _Policies) -> None:
    """Raise ``_NotAskedError`` where trainer and engine agree with each other, and neither with the model."""
    trainer, engine = replayed.parts.get("trainer"), replayed.parts["rest"]
    floor = max(replayed.gap, replayed.numbers[HEALTHY], BOUNDS.reproduced)
    if trainer is not None and min(trainer.size, engine.size) > BOUNDS.far_above_floor * floor:
        raise _NotAskedError(
            f"the log-probs of step {replayed.step} are {trainer.size:.4f} (trainer) and {engine.size:.4f} "
            f"nats (engine) from those of {folder}, and {replayed.gap:.4f} from each other: it is not the "
            f"model of that step, or the temperature of both is not {policies.temperature:g}"
        )


def _is_reproduced(replayed: ReplayedRecord, side: str) -> bool:
    """Whether the model reproduces the recorded log-probs of a side; True where none were recorded."""
    noise = {
        "trainer": replayed.numbers["noise"],
        "engine": BOUNDS.far_above_floor * replayed.numbers["engine_rounding"],
    }[side]
    part = replayed.parts.get(_PARTS[side])
    return part is None or part.size <= max(BOUNDS.reproduced, noise)


def _in_words(replayed: ReplayedRecord, policies: _Policies) -> Iterator[str]:
    sides = {
        "trainer": (policies.trainer_dtype, policies.temperature),
        "engine": (policies.engine_dtype, policies.engine_temperature),
    }
    for side, (dtype, temperature) in sides.items():
        if (part := replayed.parts.get(_PARTS[side])) is None:
            yield f"the {side}'s log-probs are not in the run's files"
            continue
        outcome = "reproduced" if _is_reproduced(replayed, side) else "not reproduced"
        yield (
            f"log-probs of the {side}, step {replayed.step}: {outcome} by the model in {dtype} at "
            f"temperature {temperature:g}, {part.size:.2g} nats apart"
        )


def _with_filled(
    statements: Sequence[Statement], filled: TokenRecord, policies: _Policies
) -> tuple[Statement, ...]:
    """The statements; where they name no specific fault, the cause that the signatures of the filled record
    name."""
    faults = [CAUSES[statement.cause] for statement in statements if statement.level == "fault"]
    metrics = {
        name.removeprefix(PREFIX): n for name, n in metrics_of(filled).items() if name.startswith(PREFIX)
    }
    cause = cause_of(metrics)
    if cause is None or any(fault.is_specific for fault in faults):
        return tuple(statements)
    steps = (filled.step, filled.step)
    return (replace(signature_statement(cause, [metrics], policies.temperature, steps), confidence="likely"),)
