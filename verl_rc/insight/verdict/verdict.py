"""All statements about a run, in order, with a headline and what to do first."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl_rc.algorithm.health.cause_table import CAUSES
from verl_rc.algorithm.health.statement import Level, Statement
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.verdict.correction import correction_statements
from verl_rc.insight.verdict.gap import checked_rules, gap_statements, invisible_causes
from verl_rc.insight.verdict.gap_series import GAP, K3
from verl_rc.insight.verdict.invariants import invariant_rows
from verl_rc.insight.verdict.learning import learning_statements
from verl_rc.insight.verdict.replays import with_replays
from verl_rc.insight.verdict.signatures import CauseRow, has_signatures, signature_rows
from verl_rc.insight.verdict.speed import speed_statements

MOST_LINES = 8
_MOST_OVERRIDES = 3
_RANK: dict[Level, int] = {"fault": 0, "notice": 1, "unknown": 2, "good": 3}
_TRAINED = "actor/grad_norm", "actor/pg_loss", "critic/score/mean", K3, GAP


@dataclass(frozen=True)
class Verdict:
    """The first part of a report."""

    headline: str
    progress: str
    """The last step of the run, and its end."""
    statements: tuple[Statement, ...]
    """Statements of each topic, in the order learning, gap, correction, speed."""
    do_first: tuple[str, ...]
    """Overrides to try first, at most three, ready to paste."""
    checked: tuple[str, ...] = ()
    """The subjects that the rules for the gap have checked."""
    not_visible: str = ""
    """The causes that no metric of the run shows."""
    rows: tuple[CauseRow, ...] = ()
    """Rows of the table of causes that invariants and signatures name, and which of them could be checked."""

    @property
    def unasked(self) -> list[str]:
        """The specific causes that could not be checked, with the fields of a token record that they need; in
        words."""
        return [
            f"{row.cause} (row {row.number}): needs {row.needs}"
            for row in self.rows
            if row.needs and not row.is_asked and CAUSES[row.cause].is_specific
        ]

    @property
    def level(self) -> Level:
        """The gravest level of any statement."""
        return min(
            (statement.level for statement in self.statements),
            key=lambda level: _RANK[level],
            default="unknown",
        )

    @property
    def code(self) -> str:
        """The level, with the causes of a fault or notice: what a list of runs is filtered by."""
        causes = [
            f"{statement.topic}/{statement.cause}"
            for statement in self.statements
            if statement.level == self.level
        ]
        return f"{self.level}: {', '.join(causes)}" if self.level in ("fault", "notice") else self.level

    def lines(self) -> list[str]:
        """Return at most eight lines for the console."""
        lines = [f"{self.headline} {self.progress}"]
        gravest = sorted(self.statements, key=lambda statement: _RANK[statement.level])[: MOST_LINES - 2]
        lines += [
            f"  {statement.topic}: {statement.text}" for statement in self.statements if statement in gravest
        ]
        if self.do_first:
            lines.append(f"  do first: {' '.join(self.do_first)}")
        return ["".join(letter if letter.isprintable() else "?" for letter in line) for line in lines]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for machines."""
        return {
            "headline": self.headline,
            "progress": self.progress,
            "level": self.level,
            "code": self.code,
            "lines": self.lines(),
            "statements": [statement.as_json() for statement in self.statements],
            "do_first": list(self.do_first),
            "checked": list(self.checked),
            "not_visible": self.not_visible,
            "rows": [asdict(row) for row in self.rows],
        }


def verdict_of(run: RunData) -> Verdict:
    """The verdict on a run, from its metrics and its replays; absent data never lead to a cause."""
    if not any(run.has(name) for name in _TRAINED):
        statements = tuple(learning_statements(run))[:1] if run.series else ()
    else:
        statements = (
            *learning_statements(run),
            *with_replays(gap_statements(run), run.replays),
            *correction_statements(run),
            *speed_statements(run),
        )
    if not _has_our_keys(run):
        statements = tuple(replace(statement, overrides=()) for statement in statements)
    return Verdict(
        _headline(statements),
        _progress(run),
        statements,
        tuple(_do_first(statements)),
        checked_rules(run),
        invisible_causes(run),
        (*invariant_rows(run), *(signature_rows(run) if has_signatures(run) else ())),
    )


def _has_our_keys(run: RunData) -> bool:
    """Whether overrides can be pasted: verl's keys are ours, and its logs of any kind have a metric of this
    name."""
    is_verl = run.trainer == "verl" or "critic/score/mean" in run.series.keys() - run.their_names
    return run.is_own or (is_verl and run.trainer in ("", "verl"))


def _headline(statements: tuple[Statement, ...]) -> str:
    for level, lead in (("fault", "Something is wrong"), ("notice", "Worth a look")):
        causes = [
            f"{statement.topic}: {statement.cause}" for statement in statements if statement.level == level
        ]
        if causes:
            return f"{lead}: {'; '.join(causes[:3])}."
    if not any(statement.level == "good" for statement in statements):
        return "Nothing can be told."
    return "Nothing is wrong, as far as metrics tell."


def _progress(run: RunData) -> str:
    last_step = run.steps[-1] if run.steps else 0
    progress = f"{last_step} of {run.total_steps}" if run.total_steps else f"{last_step}"
    if run.ending is not None:
        if run.ending.status == 0:
            return f"The run ended after {progress} steps."
        return (
            f"The run ended after {progress} steps with exit code {run.ending.status}: "
            f"{run.ending.reason.removesuffix('.')}."
        )
    if not run.steps:
        return "No step is logged."
    if run.total_steps and last_step < run.total_steps and run.is_own:
        return f"The log goes to step {progress}: it still trains, or was killed."
    return f"The log goes to step {progress}."


def _do_first(statements: tuple[Statement, ...]) -> Iterator[str]:
    """Overrides of the gravest statements. A fault of the gap comes before the correction: no preset repairs
    it."""
    gap_is_wrong = any(statement.topic == "gap" and statement.level == "fault" for statement in statements)
    keys: set[str] = set()
    for statement in sorted(
        statements, key=lambda statement: (_RANK[statement.level], statement.topic != "gap")
    ):
        if statement.level not in ("fault", "notice") or (gap_is_wrong and statement.topic == "correction"):
            continue
        for override in statement.overrides:
            key = override.partition("=")[0]
            if key not in keys and len(keys) < _MOST_OVERRIDES:
                keys.add(key)
                yield override
