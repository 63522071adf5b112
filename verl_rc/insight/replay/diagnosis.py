"""What replays of recorded tokens say of the gap of a run, beside its metrics."""

import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from verl_rc.config.models import torch_name
from verl_rc.config.run import RunConfig
from verl_rc.data.token_parquet import record_files
from verl_rc.data.token_record import FOLDER
from verl_rc.data.tokenize import load_tokenizer
from verl_rc.distributed.process_group import trainer_device
from verl_rc.insight.diagnosis import WITH_MODEL, Diagnosis, DiagnosisRequest, diagnosis_of
from verl_rc.insight.replay.engine import ReplayEngine
from verl_rc.insight.replay.mistakes import Mistakes, wrong_prompts
from verl_rc.insight.replay.operations import find_parting
from verl_rc.insight.replay.rows import NothingToReplayError, RecordedRows, chosen, read_rows
from verl_rc.insight.replay.trainer import Scoring, TrainerReplay
from verl_rc.insight.replay.weights import KeptWeights, config_of
from verl_rc.insight.run_folder import DIAGNOSIS, Part, ReplayedRecord, RunData, read_replays, read_run
from verl_rc.insight.verdict.diagnosis import with_replays
from verl_rc.insight.verdict.healthy_gap import HEALTHY
from verl_rc.insight.verdict.replays import merged, parts_of
from verl_rc.metrics.bounds import PLAUSIBLE_NOISE
from verl_rc.workers.language_model import torch_dtype


def diagnose_with_replays(request: DiagnosisRequest) -> Diagnosis:
    """Judge the gap of a run from its metrics and from replays, which are written beside the run, where its
    report finds them.

    Raises:
        ValueError: the folder holds no run, or lacks what the replays need.
    """
    run = read_run(request.folder, request.first_step, request.last_step)
    if not run.is_own:
        raise NothingToReplayError(f"{request.folder} is read as {run.source}: {WITH_MODEL}.")
    from_metrics = diagnosis_of(run)
    config = config_of(request.folder)
    with tempfile.TemporaryDirectory() as scratch:
        session = _Session(request, config, KeptWeights(config, request.folder, Path(scratch)))
        session.replay()
    records = merged(_records_of_the_run(request.folder), session.replayed)
    whole = session.diagnosis(run, from_metrics, records)
    (request.folder / DIAGNOSIS).write_text(json.dumps(whole.as_json(), indent=1) + "\n", encoding="utf-8")
    asked = [record for record in records if request.first_step <= record.step <= request.last_step]
    return session.diagnosis(run, from_metrics, asked)


def _records_of_the_run(folder: Path) -> list[ReplayedRecord]:
    """Replays of token records that are there and were not written since: a resumed run may have made a step
    again."""
    earlier = read_replays(folder, [])
    if not earlier:
        return []
    diagnosis_time = (folder / DIAGNOSIS).stat().st_mtime
    record_times = {step: path.stat().st_mtime for step, path in record_files(folder / FOLDER)}
    return [record for record in earlier if record_times.get(record.step, math.inf) <= diagnosis_time]


class _Session:
    """The replays of one run."""

    def __init__(self, request: DiagnosisRequest, config: RunConfig, kept: KeptWeights) -> None:
        rows = read_rows(request.folder, request.rows, request.first_step, request.last_step)
        self._config, self._kept, self._wanted = config, kept, set(request.replays)
        self._scoring = Scoring.from_config(config)
        self._rows = chosen(rows, kept.versions)
        self._tokenizer = load_tokenizer(
            str(config.actor_rollout_ref.model.path), config.data.trust_remote_code
        )
        self.replayed: list[ReplayedRecord] = []
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        if not self._rows:
            self.notes.append(
                "no record has its weights on the disk: trainer.save_freq keeps them, the step after is "
                "recorded"
            )

    def replay(self) -> None:
        """Replay every chosen record; the engines come last, because they run in separate processes."""
        trainer_results = [self._by_trainer(rows) for rows in self._rows]
        best = [
            record.best_version if "R3" in self._wanted else record.version for record, _ in trainer_results
        ]
        by_engine = self._by_engines(best)
        for rows, (record, scores), version, engine_result in zip(
            self._rows, trainer_results, best, by_engine, strict=True
        ):
            numbers = {**record.numbers, **engine_result.numbers}
            self.replayed.append(
                replace(record, numbers=numbers, parts=_parts(rows, scores, version, engine_result))
            )
        if "R8" in self._wanted and self._rows:
            self._by_operations()

    def diagnosis(
        self, run: RunData, from_metrics: Diagnosis, records: Sequence[ReplayedRecord]
    ) -> Diagnosis:
        """The causes that metrics name, and those that replays do."""
        causes = tuple(with_replays(run, from_metrics.statements, records))
        return Diagnosis(causes, tuple(records), self.seconds, tuple(self.notes), from_metrics.rows)

    def _by_trainer(self, rows: RecordedRows) -> tuple[ReplayedRecord, dict[int, Tensor]]:
        """What the trainer's code measures; log-probs by version of the weights."""
        scores: dict[int, Tensor] = {}
        mistakes = Mistakes()
        model = self._model(rows.trainer_version)
        with self._timed("R0"):
            scores[rows.trainer_version] = clean = model.score(rows.tokens)
            numbers = {
                "trainer_twice": rows.rms(
                    model.score_as_trained(rows.tokens), model.score_as_trained(rows.tokens)
                )
            }
        if "R1" in self._wanted:
            with self._timed("R1"):
                numbers["alone"] = rows.rms(model.score(rows.tokens, alone=True), clean)
                mistakes = self._mistakes(model, rows, clean)
                numbers |= mistakes.numbers
        precision = torch_name(self._config.actor_rollout_ref.actor.fsdp_config.dtype)
        if precision != "float32":  # other batches round otherwise there
            numbers["noise"] = numbers.get("alone", PLAUSIBLE_NOISE[precision])
        if "R4" in self._wanted:
            with self._timed("R4"):
                numbers["retokenised"] = self._retokenised_share(rows)
        with self._timed("R3"):
            for version in self._kept.versions if "R3" in self._wanted else [rows.version]:
                if version <= rows.version and version not in scores:
                    scores[version] = self._model(version).score(rows.tokens)
        if "R2" in self._wanted:
            with self._timed("R2"):
                numbers |= self._precision(rows, clean)
        gap = rows.rms(rows.train, rows.rollout) if rows.train is not None else 0.0
        sizes = {
            version: rows.rms(values, rows.rollout)
            for version, values in scores.items()
            if version <= rows.version
        }
        record = ReplayedRecord(
            rows.step,
            rows.version,
            tokens=int(rows.counted.sum()),
            gap=gap,
            versions=sizes,
            numbers=numbers,
            reproduced_by=mistakes.of_trainer,
            engine_reproduced_by=mistakes.of_engine,
        )
        return record, scores

    def _precision(self, rows: RecordedRows, clean: Tensor) -> dict[str, float]:
        """R2: what the engine's dtype makes beside the trainer's, and the healthy gap: each rounds on its
        own."""

        def score(dtype: torch.dtype) -> Tensor:
            folder = self._kept.folder(rows.trainer_version)
            return TrainerReplay(self._scoring, folder, dtype).score(rows.tokens)

        engine = score(torch_dtype(self._scoring.engine_dtype))
        numbers = {"precision": rows.rms(engine, clean)}
        rollout = self._config.actor_rollout_ref.rollout
        if rollout.quantization is None and not rollout.kv_cache_dtype.startswith("fp8"):
            exact = clean if torch_name(self._scoring.dtype) == "float32" else score(torch.float32)
            numbers[HEALTHY] = math.hypot(rows.rms(engine, exact), rows.rms(clean, exact))
        return numbers

    def _by_engines(self, versions: Sequence[int]) -> list["_EngineResult"]:
        """What engines measure of each record with the weights that the run's engine held."""
        results = [_EngineResult() for _ in self._rows]
        replays = self._wanted & {"R5", "R6", "R7"}
        if replays and self._config.actor_rollout_ref.rollout.temperature != 1.0:
            self.notes.append(
                f"{', '.join(sorted(replays))} left out: engines that are given tokens score them at "
                "temperature 1"
            )
        elif replays and self._rows:
            if replays != {"R6"}:
                self._by_run_engine(results, versions)
            if "R6" in replays:
                self._by_plain_engine(results, versions)
        return results

    def _by_run_engine(self, results: Sequence["_EngineResult"], versions: Sequence[int]) -> None:
        """R5 and R7, by one engine built as the run's was."""
        with self._timed("R5" if "R5" in self._wanted else "R7"):
            engine = ReplayEngine(self._config, self._kept.folder(versions[0]), caches="R7" in self._wanted)
        with closing(engine):
            for rows, result, version in zip(self._rows, results, versions, strict=True):
                if "R5" in self._wanted:
                    with self._timed("R5"):
                        result.prefill = engine.prefilled(rows, self._kept.folder(version))
                if "R7" in self._wanted:
                    with self._timed("R7"):
                        self._by_cache(engine, rows, result, version)

    def _by_cache(
        self, engine: ReplayEngine, rows: RecordedRows, result: "_EngineResult", version_held: int
    ) -> None:
        """R7: with an empty cache, and with one that older weights filled: those of the start, and the
        last before."""
        result.decode, _ = engine.decoded(rows, self._kept.folder(version_held))
        result.numbers["own_cache"] = rows.rms(result.decode, rows.rollout)
        older = [version for version in self._kept.versions if version < rows.version]
        for version in sorted({*older[:1], *older[-1:]}):
            stale, cached = engine.decoded(rows, self._kept.folder(rows.version), self._kept.folder(version))
            size = rows.rms(stale, rows.rollout)
            if size < result.numbers.get("stale_cache", math.inf):
                result.numbers |= {"stale_cache": size, "stale_version": version, "cached_tokens": cached}

    def _by_operations(self) -> None:
        """R8: of the last record."""
        rollout, rows = self._config.actor_rollout_ref.rollout, self._rows[-1]
        is_quantised = rollout.quantization is not None or rollout.kv_cache_dtype.startswith("fp8")
        if is_quantised or trainer_device(self._config.trainer.device).type != "cpu":
            self.notes.append("R8 left out: it knows engines on a CPU, without quantisation")
            return
        with self._timed("R8"):
            found = find_parting(self._config, self._kept.folder(rows.version), rows.prompts)
        numbers = {"operation_gap": found.gap, "operation_rounding": found.rounding}
        last = self.replayed[-1]
        self.replayed[-1] = replace(last, operation=found.beyond, numbers={**last.numbers, **numbers})
        if not found.beyond:
            first = f"the first that differs at all is {found.first}" if found.first else "all are equal"
            self.notes.append(f"R8: no operation is farther from the trainer's than rounding makes; {first}")

    def _by_plain_engine(self, results: Sequence["_EngineResult"], versions: Sequence[int]) -> None:
        """R6: the engine's code alone, against the trainer's in float32."""
        with self._timed("R6"):
            with closing(ReplayEngine(self._config, self._kept.folder(versions[0]), plain=True)) as engine:
                for rows, result, version in zip(self._rows, results, versions, strict=True):
                    result.plain = engine.prefilled(rows, self._kept.folder(version))
            for rows, result, version in zip(self._rows, results, versions, strict=True):
                assert result.plain is not None
                exact = TrainerReplay(self._scoring, self._kept.folder(version), torch.float32).score(
                    rows.tokens
                )
                result.numbers["kernels"] = rows.rms(exact, result.plain)

    def _mistakes(self, model: TrainerReplay, rows: RecordedRows, clean: Tensor) -> Mistakes:
        longest, padding = self._config.data.max_prompt_length, self._tokenizer.pad_token_id
        mistaken = {
            name: model.score(rows.with_prompts(prompts))
            for name, prompts in wrong_prompts(rows.prompts, longest, padding)
        }
        # Else other weights would be in the comparison, too.
        rollout = rows.rollout if rows.version == rows.trainer_version else None
        return Mistakes.from_scores(rows.rms, clean, mistaken, rows.train, rollout)

    def _retokenised_share(self, rows: RecordedRows) -> float:
        """Share of rows whose ids do not come back from their text."""
        count = 0
        for row, length in enumerate(rows.tokens.response_lengths.tolist()):
            ids = rows.tokens.responses[row, :length].tolist()
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            count += self._tokenizer.encode(text, add_special_tokens=False) != ids
        return count / len(rows.tokens)

    def _model(self, version: int) -> TrainerReplay:
        return TrainerReplay(self._scoring, self._kept.folder(version))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds inside it to those of a replay."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass
class _EngineResult:
    """What engines measured of a record, as far as they were asked: log-probs float32 ``[B, R]``, nats."""

    plain: Tensor | None = None
    prefill: Tensor | None = None
    decode: Tensor | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def _parts(
    rows: RecordedRows, scores: Mapping[int, Tensor], version: int, engines: _EngineResult
) -> dict[str, Part]:
    """The gap as a sum, from the trainer to the engine; a part that was not replayed is in its
    predecessor."""
    chain = [("trainer", rows.train), ("versions", scores[rows.trainer_version]), ("engine", scores[version])]
    chain += [("precision", engines.plain), ("decode", engines.prefill), ("rest", engines.decode)]
    measured = [(name, values) for name, values in chain if values is not None]
    if measured[-1][0] == "decode":  # what separates the two was not replayed
        measured[-1] = ("rest", measured[-1][1])
    return parts_of(
        [(name, values[rows.counted].numpy()) for name, values in measured],
        rows.rollout[rows.counted].numpy(),
    )
