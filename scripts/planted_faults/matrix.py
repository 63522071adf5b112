"""From run folders to the matrix: which cause the doctor names first, without replays and with them."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from planted_faults.faults import LEFT_OUT, Fault
from planted_faults.runs import PLANS, PlantedRun, overrides_of

from verl_rc.health.cause_table import BEYOND_ROUNDING, GROWN, LARGE
from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import RunData, read_run
from verl_rc.insight.verdict import judge

NOT_SEPARABLE = (GROWN.name, LARGE.name, BEYOND_ROUNDING.name)
STOPPED = "stopped by the run itself"


@dataclass(frozen=True)
class Named:
    """What the doctor named first."""

    cause: str
    outcome: str
    """right, not seen, not separable, wrong; ``false alarm`` where nothing was planted."""
    sentence: str

    def as_json(self) -> dict[str, str]:
        """Return it for the file of results."""
        return {"cause": self.cause, "outcome": self.outcome, "sentence": self.sentence}


def named_first(run: RunData, fault: Fault, ended_with: str) -> Named:
    """The first fault or notice of the gap; where there is none, what is said instead."""
    if fault.checks and any(word in ended_with for word in fault.checks):
        return Named(STOPPED, "right", ended_with)
    statements = [statement for statement in judge(run).statements if statement.topic == "gap"]
    return named_of(statements, fault, ended_with)


def named_of(statements: Sequence[Statement], fault: Fault, ended_with: str = "") -> Named:
    """The first fault or notice of some statements about the gap."""
    first = next(
        (statement for statement in statements if statement.level in ("fault", "notice")),
        statements[0] if statements else None,
    )
    if first is None:
        return Named("nothing was logged", "not seen", ended_with)
    return Named(first.cause, _outcome(first, fault), first.text)


def _outcome(first: Statement, fault: Fault) -> str:
    is_silent = first.level not in ("fault", "notice")
    if fault.number == 0:
        return "right" if is_silent else "false alarm"
    if first.cause in fault.remedies:
        return "right"
    if is_silent:
        return "not seen"
    return "not separable" if first.cause in NOT_SEPARABLE else "wrong"


def made_by(arm: str, seed: int) -> str:
    """A fingerprint of all that decides the numbers of a run."""
    return sha256(json.dumps([overrides_of(arm, seed), PLANS[arm].planted]).encode()).hexdigest()[:12]


def row_of(run: PlantedRun) -> dict[str, Any]:
    """One row of the matrix."""
    fault, data = PLANS[run.arm], read_run(run.folder)
    ended_with = _last_error(run.folder / "output.log") if run.exit_status else ""
    row: dict[str, Any] = {
        "arm": run.arm,
        "fault": fault.number,
        "seed": run.seed,
        "exit_status": run.exit_status,
    }
    row |= {"seconds": run.seconds, "made_by": made_by(run.arm, run.seed)}
    row["without_replays"] = named_first(replace(data, replays=(), _finite={}), fault, ended_with).as_json()
    if data.replays:
        row["with_replays"] = named_first(data, fault, ended_with).as_json()
        row["replayed"] = [
            {key: _rounded(value) for key, value in replay.as_json().items()} for replay in data.replays
        ]
    return row


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {key: _rounded(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if "Error" in line and ":" in line), "")


def write_matrix(
    path: Path, table: Collection[str], rows: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Write rows in place of older ones of the same arms and seeds, with what was left out; return all rows
    of the file.

    Rows of other runs stay, as run folders do not, if today's arms of ``table`` would make them.
    """
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    before = [
        row for row in before if row["arm"] in table and row["made_by"] == made_by(row["arm"], row["seed"])
    ]
    row_of_run = {(row["seed"], row["arm"]): row for row in (*before, *rows)}
    order = {arm: place for place, arm in enumerate(table)}
    ordered = [row_of_run[run] for run in sorted(row_of_run, key=lambda run: (run[0], order[run[1]]))]
    left_out = {str(number): why for number, why in LEFT_OUT.items()}
    text = ",\n".join(f"  {json.dumps(row)}" for row in ordered)
    path.write_text(f'{{"left_out": {json.dumps(left_out)},\n "rows": [\n{text}\n]}}\n', encoding="utf-8")
    return ordered


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The matrix as a Markdown table, with its sums."""
    lines = ["| arm | seed | without replays | with replays |", "|---|---|---|---|"]
    for row in rows:
        cells = [_cell(row.get(kind)) for kind in ("without_replays", "with_replays")]
        lines.append(f"| {row['arm']} | {row['seed']} | {' | '.join(cells)} |")
    for kind in ("without_replays", "with_replays"):
        faulty = [row for row in rows if kind in row and row["fault"]]
        outcomes = [row[kind]["outcome"] for row in faulty]
        healthy = [row[kind]["outcome"] for row in rows if kind in row and not row["fault"]]
        counts = ", ".join(
            f"{outcomes.count(name)} {name}" for name in ("right", "not separable", "not seen", "wrong")
        )
        lines.append(
            f"{kind.replace('_', ' ')}: {counts} of {len(faulty)}; {healthy.count('false alarm')} false "
            f"alarms of {len(healthy)} healthy runs"
        )
    return lines


def _cell(named: Mapping[str, str] | None) -> str:
    return "" if named is None else f"{named['outcome']}: {named['cause']}"
