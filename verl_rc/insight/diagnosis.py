"""The causes of a run's gap, from its metrics, and the replays that would say more. Needs no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verl_rc.algorithm.health.statement import Statement
from verl_rc.insight.run_folder import ReplayedRecord, RunData, read_run
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.insight.verdict import verdict_of
from verl_rc.insight.verdict.gap import gap_statements
from verl_rc.insight.verdict.signatures import CauseRow

REPLAYS: Mapping[str, str] = {
    "R0": "the trainer twice, with its weights of the step, and against what it recorded: 2 forwards",
    "R3": "the trainer with each version of the weights that was saved: 1 forward each; needs checkpoints",
}
"""Replays of docs/see_why.md that ``verl-rc diagnose`` can make, and the cost of each for a record."""


@dataclass(frozen=True)
class DiagnosisRequest:
    """The arguments of ``verl-rc diagnose``."""

    folder: Path
    replays: Sequence[str] = ()
    """Names out of ``REPLAYS``."""
    rows: int = 64
    """Most rows of a record that are replayed."""
    first_step: int = 0
    last_step: int = LARGEST_STEP
    trust_remote_code: bool = False
    """Whether code that comes with the run's model may run."""


@dataclass(frozen=True)
class Diagnosis:
    """Causes of the gap, in the order in which to look at them, and the replays behind them."""

    statements: tuple[Statement, ...]
    replayed: tuple[ReplayedRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences on what was not replayed or checked, and why."""
    rows: tuple[CauseRow, ...] = ()
    """Rows of the table of causes that invariants and signatures name, and which of them could be checked."""

    def lines(self) -> Iterator[str]:
        """The diagnosis for the console."""
        for statement in self.statements:
            yield f"{statement.level}: {statement.cause}: {statement.text}"
            if statement.next_test:
                yield f"  next: {statement.next_test}"
        for record in self.replayed:
            nearest = f", nearest weights {record.best_version}" if record.versions else ""
            yield (
                f"  step {record.step}, {record.tokens} tokens: gap {record.gap:.4f} nats, trainer again "
                f"{record.trainer:.4f} ({record.share:.0%}){nearest}"
            )
        yield from (f"  {note}" for note in self.notes)

    def as_json(self) -> dict[str, Any]:
        """The diagnosis for machines."""
        return {
            "statements": [statement.as_json() for statement in self.statements],
            "replayed": [record.as_json() for record in self.replayed],
            "notes": list(self.notes),
            "rows": [asdict(row) for row in self.rows],
        }


def diagnose(request: DiagnosisRequest) -> Diagnosis:
    """Diagnose the gap of a run from its metrics. Raises ``ValueError`` where the folder holds no run."""
    run = read_run(request.folder, request.first_step, request.last_step)
    diagnosis = diagnosis_of(run)
    replays = "; ".join(f"{name} ({cost})" for name, cost in REPLAYS.items())
    further = (f"replays that --replay makes: {replays}",) if run.is_own else ()
    return replace(diagnosis, notes=(*diagnosis.notes, *further))


def diagnosis_of(run: RunData) -> Diagnosis:
    """The diagnosis by the metrics of a run, without the replays in its folder."""
    notes = run.notes if run.is_own else [f"read as: {run.source}", *run.notes]
    verdict = verdict_of(replace(run, replays=()))
    unasked = [f"not asked: {sentence}" for sentence in verdict.unasked]
    statements = tuple(statement for statement in verdict.statements if statement.topic == "gap")
    statements = statements or tuple(gap_statements(run))  # that it was not measured: nothing was trained
    return Diagnosis(statements, notes=(*notes, *unasked), rows=verdict.rows)
