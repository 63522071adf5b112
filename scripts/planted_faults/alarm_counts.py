"""What a study of false alarms counts: by row of the table of causes, the steps that could ask it and those
that it named."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_rc.health import cause_table as table
from verl_rc.health.causes import PREFIX, cause_of
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.verdict import judge
from verl_rc.insight.verdict.gap_series import GAP, K3, gaps_by_age
from verl_rc.insight.verdict.invariants import INVARIANTS_BY_NAME

PARTS = ("own runs", "TRL and verl", "sampled by a model", "files of other trainers")
"""Whose steps are counted, each apart; the last two are simulated."""
_METRICS_OF_RUN_CAUSES = {
    table.OVERFLOW: f"{PREFIX}nonfinite_token_fraction",
    table.LOST_IN_ROUNDING: "sync/update_survival",
    table.WEIGHTS_NEVER_ARRIVE: "actor/ppo_kl",
    table.ONE_VERSION_LATE: "actor/ppo_kl",
    table.MISSED_UPDATE: GAP,
    table.LARGE: f"{PREFIX}logit_noise_least",
    table.BEYOND_ROUNDING: GAP,
    table.GROWN: K3,
}
"""Without which a rule that looks at a whole run is not asked."""


@dataclass
class Counts:
    """Steps of runs, and by cause how many could be asked for it and how many were called by it."""

    steps: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    alarms: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        """Count other runs, too."""
        self.steps += other.steps
        self.asked.update(other.asked)
        self.alarms.update(other.alarms)

    def as_json(self) -> dict[str, object]:
        """Return the counts for a file."""
        return {"steps": self.steps, "asked": dict(self.asked), "alarms": dict(self.alarms)}


def counts_from_json(entry: Mapping[str, object]) -> Counts:
    """Counts that ``as_json`` made."""
    return Counts(int(entry["steps"]), Counter(entry["asked"]), Counter(entry["alarms"]))  # type: ignore[call-overload, arg-type]


def counted(readings: Iterable[RunData]) -> Counts:
    """The counts of one run, whose steps were read in several ways.

    A step counts once for a cause, whichever of the ways asks or names it. A cause that speaks of a whole run
    counts as one alarm.
    """
    asked, alarms = set[tuple[str, int]](), set[tuple[str, int]]()
    steps = set[int]()
    for run in readings:
        steps.update(run.steps)
        for step, metrics in _signatures(run).items():
            asked |= {
                (cause.name, step)
                for cause in table.SIGNATURE_CAUSES
                if cause.evidence_in(metrics) is not None
            }
            cause = cause_of(metrics)
            alarms |= set() if cause is None else {(cause.name, step)}
        for step, invariants in (run.tokens.invariants if run.tokens is not None else {}).items():
            for name, broken in invariants.items():
                mark = (INVARIANTS_BY_NAME[name][0].name, step)
                asked.add(mark)
                alarms |= {mark} if broken.rows else set()
        asked |= {(cause.name, step) for cause in _run_causes(run) for step in run.steps}
        alarms |= {(name, run.steps[-1]) for name in _said(run)}
    return Counts(len(steps), Counter(name for name, _ in asked), Counter(name for name, _ in alarms))


def _signatures(run: RunData) -> dict[int, dict[str, float]]:
    """The signatures of each step."""
    by_step: dict[int, dict[str, float]] = {step: {} for step in run.steps}
    for name, series in run.matching(PREFIX):
        for step, value in series.by_step().items():
            by_step[step][name.removeprefix(PREFIX)] = value
    return by_step


def _run_causes(run: RunData) -> list[table.Cause]:
    """The causes that a whole run can be asked for."""
    causes = [
        cause
        for cause, name in _METRICS_OF_RUN_CAUSES.items()
        if run.has(name) or (cause is table.GROWN and run.has(GAP))
    ]
    if run.has(f"{PREFIX}logit_noise") and table.LARGE not in causes:
        causes.append(table.LARGE)
    return [*causes, table.STALENESS] if len(gaps_by_age(run)) > 1 else causes


def _said(run: RunData) -> set[str]:
    """Causes that the verdict on a run names and that no single step does."""
    of_steps = {cause.name for cause in (*table.SIGNATURE_CAUSES, *table.INVARIANTS)}
    return {
        statement.cause
        for statement in judge(run).statements
        if statement.topic == "gap"
        and statement.level in ("fault", "notice")
        and statement.cause not in of_steps
    }


def upper_bound(count: int) -> float:
    """The largest expected count that would show at most ``count`` in 5 of 100 cases (Poisson)."""
    low, high = 0.0, 20.0 + 3.0 * count
    for _ in range(60):
        middle = (low + high) / 2
        at_most = sum(math.exp(-middle + k * math.log(middle) - math.lgamma(k + 1)) for k in range(count + 1))
        low, high = (middle, high) if at_most > 0.05 else (low, middle)
    return high


def sums_of(lines: Iterable[str]) -> dict[str, Counts]:
    """The counts of each part, from lines ``{"part": …, "counts": …}``."""
    sums = {part: Counts() for part in PARTS}
    for line in lines:
        entry = json.loads(line)
        sums[entry["part"]].add(counts_from_json(entry["counts"]))
    return sums


def read_sums(path: Path) -> dict[str, Counts]:
    """The counts of each part, from the file that the documents rest on."""
    return {part: counts_from_json(entry) for part, entry in json.loads(path.read_text("utf-8")).items()}


def table_of(sums: Mapping[str, Counts]) -> str:
    """Markdown: each cause that steps were asked for, with alarms for 1,000 of them and their bound."""
    head = f"| row | cause | {' | '.join(PARTS)} | alarms | for 1,000 | at most |\n|{'---|' * 9}\n"
    steps = " | ".join(f"{sums[part].steps:,}" for part in PARTS)
    lines = [f"| | steps | {steps} | | | |\n"]
    every: Sequence[table.Cause] = (*table.SIGNATURE_CAUSES, *table.INVARIANTS, *table.RUN_CAUSES)
    for name, row in sorted({cause.name: cause.row for cause in every}.items(), key=lambda item: item[1]):
        asked = [sums[part].asked[name] for part in PARTS]
        alarms = sum(sums[part].alarms[name] for part in PARTS)
        if sum(asked):
            rates = (1000 * number / sum(asked) for number in (alarms, upper_bound(alarms)))
            cells = [str(row), name, *(f"{count:,}" for count in asked), str(alarms)]
            lines.append(f"| {' | '.join([*cells, *(f'{rate:.2f}' for rate in rates)])} |\n")
    return head + "".join(lines)
