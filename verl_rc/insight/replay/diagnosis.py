"""``verl-rc diagnose --replay``: causes of a run's gap, from metrics and from replays of recorded tokens."""

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

from verl_rc.config.files import whole_or_absent
from verl_rc.config.models import torch_name
from verl_rc.config.run import RunConfig
from verl_rc.data.token_parquet import record_files
from verl_rc.data.token_record import FOLDER
from verl_rc.data.tokenize import load_tokenizer
from verl_rc.distributed.process_group import trainer_device
from verl_rc.insight.diagnosis import Diagnosis, DiagnosisRequest, diagnosis_of
from verl_rc.insight.replay.engine import ReplayEngine
from verl_rc.insight.replay.mistakes import Mistakes, wrong_prompts
from verl_rc.insight.replay.operations import find_divergence
from verl_rc.insight.replay.rows import NothingToReplayError, RecordedRows, read_rows, select_records
from verl_rc.insight.replay.trainer import TrainerReplay
from verl_rc.insight.replay.weights import KeptWeights, config_of
from verl_rc.insight.run_folder import DIAGNOSIS, Part, ReplayedRecord, RunData, read_replays, read_run
from verl_rc.insight.verdict.diagnosis import with_replays
from verl_rc.insight.verdict.healthy_gap import HEALTHY
from verl_rc.insight.verdict.replays import merged, parts_of
from verl_rc.metrics.bounds import PLAUSIBLE_NOISE
from verl_rc.workers.language_model import torch_dtype


def diagnose_with_replays(request: DiagnosisRequest) -> Diagnosis:
    """Judge the gap of a run from its metrics and from replays.

    The replays are written to ``diagnosis.json`` in the run's folder, where its report reads them.

    Raises:
        ValueError: the folder holds no run, or lacks what the replays need.
    """
    run = read_run(request.folder, request.first_step, request.last_step)
    if not run.is_own:
        raise NothingToReplayError(f"{request.folder} must be a run of verl_rc; it is read as {run.source}.")
    from_metrics = diagnosis_of(run)
    config = config_of(request.folder, request.trust_remote_code)
    with tempfile.TemporaryDirectory() as scratch:
        session = _Session(request, config, KeptWeights(config, request.folder, Path(scratch)))
        session.replay()
    records = merged(_records_of_the_run(request.folder), session.replayed)
    document = json.dumps(session.diagnosis(run, from_metrics, records).as_json(), indent=1)
    with whole_or_absent(request.folder / DIAGNOSIS) as file:
        file.write(f"{document}\n".encode())
    span = range(request.first_step, request.last_step + 1)
    return session.diagnosis(run, from_metrics, [record for record in records if record.step in span])


def _records_of_the_run(folder: Path) -> list[ReplayedRecord]:
    """Earlier replays, without those of token records that are gone or were written again: a resumed run may
    have repeated a step."""
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
        self._config, self._kept, self._replays = config, kept, set(request.replays)
        self._rows = select_records(rows, kept.versions)
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
        """Replay every selected record; the engines come last, because they run in separate processes."""
        trainer_results = [self._by_trainer(rows) for rows in self._rows]
        versions = [
            record.best_version if "R3" in self._replays else record.version for record, _ in trainer_results
        ]
        results = zip(self._rows, trainer_results, versions, self._by_engines(versions), strict=True)
        for rows, (record, scores), version, engine_result in results:
            numbers = {**record.numbers, **engine_result.numbers}
            parts = _parts(rows, scores, version, engine_result)
            self.replayed.append(replace(record, numbers=numbers, parts=parts))
        if "R8" in self._replays and self._rows:
            self._by_operations()

    def diagnosis(
        self, run: RunData, from_metrics: Diagnosis, records: Sequence[ReplayedRecord]
    ) -> Diagnosis:
        """The causes that metrics name, and those that replays do."""
        causes = tuple(with_replays(run, from_metrics.statements, records))
        return Diagnosis(causes, tuple(records), self.seconds, tuple(self.notes), from_metrics.rows)

    def _by_trainer(self, rows: RecordedRows) -> tuple[ReplayedRecord, dict[int, Tensor]]:
        """Measurements by the trainer's code, and its log-probs ``[B, R]`` by version of the weights."""
        mistakes = Mistakes()
        model = self._model(rows.trainer_version)
        with self._timed("R0"):
            clean = model.score(rows.tokens)
            first, second = (model.score_as_trained(rows.tokens) for _ in range(2))
        scores, numbers = {rows.trainer_version: clean}, {"trainer_twice": rows.rms(first, second)}
        if "R1" in self._replays:
            with self._timed("R1"):
                numbers["alone"] = rows.rms(model.score(rows.tokens, alone=True), clean)
                mistakes = self._mistakes(model, rows, clean)
                numbers |= mistakes.numbers
        precision = torch_name(self._config.actor_rollout_ref.actor.fsdp_config.dtype)
        if precision != "float32":  # other batches round otherwise there
            numbers["noise"] = numbers.get("alone", PLAUSIBLE_NOISE[precision])
        if "R4" in self._replays:
            with self._timed("R4"):
                numbers["retokenised"] = self._retokenised_share(rows)
        with self._timed("R3"):
            for version in self._kept.versions if "R3" in self._replays else [rows.version]:
                if version <= rows.version and version not in scores:
                    scores[version] = self._model(version).score(rows.tokens)
        if "R2" in self._replays:
            with self._timed("R2"):
                numbers |= self._precision(rows, clean)
        sizes = {
            version: rows.rms(log_probs, rows.rollout)
            for version, log_probs in scores.items()
            if version <= rows.version
        }
        record = ReplayedRecord(
            rows.step,
            rows.version,
            tokens=int(rows.counted.sum()),
            gap=rows.gap,
            versions=sizes,
            numbers=numbers,
            reproduced_by=mistakes.trainer,
            engine_reproduced_by=mistakes.engine,
        )
        return record, scores

    def _precision(self, rows: RecordedRows, clean: Tensor) -> dict[str, float]:
        """R2: the gap that the engine's dtype makes beside the trainer's, and the healthy gap, for which both
        round independently."""
        actor, rollout = self._config.actor_rollout_ref.actor, self._config.actor_rollout_ref.rollout
        engine = self._model(rows.trainer_version, torch_dtype(rollout.dtype)).score(rows.tokens)
        numbers = {"precision": rows.rms(engine, clean)}
        if not self._is_quantised:
            is_exact = torch_name(actor.fsdp_config.dtype) == "float32"
            exact = clean if is_exact else self._model(rows.trainer_version, torch.float32).score(rows.tokens)
            numbers[HEALTHY] = math.hypot(rows.rms(engine, exact), rows.rms(clean, exact))
        return numbers

    @property
    def _is_quantised(self) -> bool:
        """Whether the engine's weights or its KV cache are quantised."""
        rollout = self._config.actor_rollout_ref.rollout
        return rollout.quantization is not None or rollout.kv_cache_dtype.startswith("fp8")

    def _by_engines(self, versions: Sequence[int]) -> list["_EngineResult"]:
        """Measurements of each record by engines with the weights ``versions`` of the run's engine."""
        results = [_EngineResult() for _ in self._rows]
        replays = self._replays & {"R5", "R6", "R7"}
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
        with self._timed("R5" if "R5" in self._replays else "R7"):
            engine = ReplayEngine(self._config, self._kept.folder(versions[0]), caches="R7" in self._replays)
        with closing(engine):
            for rows, result, version in zip(self._rows, results, versions, strict=True):
                if "R5" in self._replays:
                    with self._timed("R5"):
                        result.prefill = engine.prefilled(rows, self._kept.folder(version))
                if "R7" in self._replays:
                    with self._timed("R7"):
                        self._by_cache(engine, rows, result, version)

    def _by_cache(
        self, engine: ReplayEngine, rows: RecordedRows, result: "_EngineResult", version_held: int
    ) -> None:
        """R7: with an empty prefix cache, and with one that older weights filled: the first version, and the
        version before."""
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
        if self._is_quantised or trainer_device(self._config.trainer.device).type != "cpu":
            self.notes.append("R8 left out: it knows engines on a CPU, without quantisation")
            return
        with self._timed("R8"):
            rows = self._rows[-1]
            divergence = find_divergence(self._config, self._kept.folder(rows.version), rows.prompts)
        last, operation = self.replayed[-1], divergence.beyond_rounding
        numbers = {"operation_gap": divergence.gap, "operation_rounding": divergence.rounding}
        self.replayed[-1] = replace(last, operation=operation, numbers={**last.numbers, **numbers})
        if not operation:
            first = divergence.first and f"the first that differs at all is {divergence.first}"
            first = first or "all are equal"
            self.notes.append(f"R8: no operation is farther from the trainer's than rounding makes; {first}")

    def _by_plain_engine(self, results: Sequence["_EngineResult"], versions: Sequence[int]) -> None:
        """R6: the engine's code alone, against the trainer's in float32."""
        with self._timed("R6"):
            with closing(ReplayEngine(self._config, self._kept.folder(versions[0]), plain=True)) as engine:
                for rows, result, version in zip(self._rows, results, versions, strict=True):
                    result.plain = engine.prefilled(rows, self._kept.folder(version))
            for rows, result, version in zip(self._rows, results, versions, strict=True):
                assert result.plain is not None
                exact = self._model(version, torch.float32).score(rows.tokens)
                result.numbers["kernels"] = rows.rms(exact, result.plain)

    def _mistakes(self, model: TrainerReplay, rows: RecordedRows, clean: Tensor) -> Mistakes:
        longest, padding = self._config.data.max_prompt_length, self._tokenizer.pad_token_id
        mistaken = {
            name: model.score(rows.with_prompts(prompts))
            for name, prompts in wrong_prompts(rows.prompts, longest, padding)
        }
        # The trainer's weights must be the engine's, or the comparison would measure the weights, too.
        rollout = rows.rollout if rows.version == rows.trainer_version else None
        return Mistakes.from_scores(rows.rms, clean, mistaken, rows.train, rollout)

    def _retokenised_share(self, rows: RecordedRows) -> float:
        """Share of rows whose text is encoded to other ids."""
        count = 0
        for row, length in enumerate(rows.tokens.response_lengths.tolist()):
            ids = rows.tokens.responses[row, :length].tolist()
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            count += self._tokenizer.encode(text, add_special_tokens=False) != ids
        return count / len(rows.tokens)

    def _model(self, version: int, dtype: torch.dtype | None = None) -> TrainerReplay:
        return TrainerReplay(self._config, self._kept.folder(version), dtype)

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
    """Measurements of a record by engines: log-probs float32 ``[B, R]``, nats; None without the replay."""

    plain: Tensor | None = None
    """R6: of the engine in float32, one row at a time."""
    prefill: Tensor | None = None
    """R5: of the run's engine by prefill."""
    decode: Tensor | None = None
    """R7: of the run's engine token by token."""
    numbers: dict[str, float] = field(default_factory=dict)


def _parts(
    rows: RecordedRows, scores: Mapping[int, Tensor], version: int, engines: _EngineResult
) -> dict[str, Part]:
    """Parts whose sum is the gap, from the trainer to the engine. The part before a missing replay includes
    that replay's part."""
    chain = [("trainer", rows.train), ("versions", scores[rows.trainer_version]), ("engine", scores[version])]
    chain += [("precision", engines.plain), ("decode", engines.prefill), ("rest", engines.decode)]
    measured = [(name, values) for name, values in chain if values is not None]
    if measured[-1][0] == "decode":  # no R7 separates it from the rest
        measured[-1] = ("rest", measured[-1][1])
    return parts_of(
        [(name, values[rows.counted].numpy()) for name, values in measured],
        rows.rollout[rows.counted].numpy(),
    )
