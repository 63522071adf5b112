"""``verl-rc diagnose --replay``: causes of a run's gap, from metrics and from replays of recorded tokens."""

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_rc.config.files import whole_or_absent
from verl_rc.config.models import torch_name
from verl_rc.config.run import RunConfig
from verl_rc.insight.diagnosis import Diagnosis, DiagnosisRequest, diagnosis_of
from verl_rc.insight.replay.rows import NothingToReplayError, RecordedRows, read_rows, select_records
from verl_rc.insight.replay.trainer import TrainerReplay
from verl_rc.insight.replay.weights import SavedWeights, config_of
from verl_rc.insight.run_folder import DIAGNOSIS, ReplayedRecord, read_replays, read_run
from verl_rc.insight.verdict.replays import merged, with_replays
from verl_rc.metrics.bounds import PLAUSIBLE_NOISE
from verl_rc.records.token_records.token_parquet import record_files
from verl_rc.records.token_records.token_record import FOLDER


def diagnose_with_replays(request: DiagnosisRequest) -> Diagnosis:
    """Diagnose the gap of a run from its metrics and from replays.

    The replays are written to ``diagnosis.json`` in the run's folder, where its report reads them.

    Raises:
        ValueError: the folder holds no run, or lacks what the replays need.
    """
    run = read_run(request.folder, request.first_step, request.last_step)
    if not run.is_own:
        raise NothingToReplayError(f"{request.folder} must be a run of verl_rc; it is read as {run.source}.")
    from_metrics = diagnosis_of(run)
    config = config_of(request.folder, request.trust_remote_code)
    rows = read_rows(request.folder, request.rows, request.first_step, request.last_step)
    with tempfile.TemporaryDirectory() as scratch:
        saved = SavedWeights(config, request.folder, Path(scratch))
        replayed = [
            _replay(one, config, saved, "R3" in request.replays)
            for one in select_records(rows, saved.versions)
        ]

    def diagnosis(records: Sequence[ReplayedRecord]) -> Diagnosis:
        lacking = () if replayed else (_NO_WEIGHTS,)
        causes = tuple(with_replays(from_metrics.statements, records))
        return Diagnosis(causes, tuple(records), lacking, from_metrics.rows)

    records = merged(_records_of_the_run(request.folder), replayed)
    with whole_or_absent(request.folder / DIAGNOSIS) as file:
        file.write(f"{json.dumps(diagnosis(records).as_json(), indent=1)}\n".encode())
    return diagnosis([record for record in records if request.first_step <= record.step <= request.last_step])


_NO_WEIGHTS = (
    "no record has its weights on the disk: trainer.save_freq keeps them, the step after is recorded"
)


def _records_of_the_run(folder: Path) -> list[ReplayedRecord]:
    """Earlier replays, without those of token records that are gone or were written again: a resumed run may
    have repeated a step."""
    earlier = read_replays(folder, [])
    if not earlier:
        return []
    diagnosis_time = (folder / DIAGNOSIS).stat().st_mtime
    record_times = {step: path.stat().st_mtime for step, path in record_files(folder / FOLDER)}
    return [record for record in earlier if record_times.get(record.step, math.inf) <= diagnosis_time]


def _replay(
    rows: RecordedRows, config: RunConfig, saved: SavedWeights, every_version: bool
) -> ReplayedRecord:
    """R0 of a record; with ``every_version`` R3, too."""
    model = TrainerReplay(config, saved.folder(rows.trainer_version))
    clean = model.score(rows.tokens)
    first, second = (model.score_as_trained(rows.tokens) for _ in range(2))
    versions = {}
    for version in [version for version in saved.versions if every_version and version <= rows.version]:
        is_here = version == rows.trainer_version
        scores = clean if is_here else TrainerReplay(config, saved.folder(version)).score(rows.tokens)
        versions[version] = rows.rms(scores, rows.rollout)
    precision = torch_name(config.actor_rollout_ref.actor.fsdp_config.dtype)
    return ReplayedRecord(
        rows.step,
        rows.version,
        tokens=int(rows.counted.sum()),
        gap=rows.gap,
        trainer=0.0 if rows.train is None else rows.rms(rows.train, clean),
        share=rows.share(clean),
        trainer_twice=rows.rms(first, second),
        noise=0.0 if precision == "float32" else PLAUSIBLE_NOISE[precision],
        versions=versions,
    )
