"""The causes that token records show without statistics, and which of them could be checked."""

from verl_rc.health import cause_table as table
from verl_rc.health.causes import cause_statement
from verl_rc.health.statement import Statement
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.run_folder.lines import first_few
from verl_rc.insight.verdict.signatures import Row
from verl_rc.metrics.bounds import BOUNDS

INVARIANTS_BY_NAME = {
    "stop": (table.STOP_LOST, "finished, response_ids and the fact stop_token_ids"),
    "equal": (table.EQUAL_SAMPLES, "response_ids"),
    "vocabulary": (table.OUTSIDE_VOCABULARY, "response_ids"),
    "shifted": (table.SHIFTED_ROWS, "old_log_prob"),
    "floor": (table.FLOORED, "old_log_prob"),
    "mask": (table.OUTSIDE_MASK, ""),
}
"""Causes, and what they need, by the names of ``run_folder.invariants``."""

_MOST_NAMED = 5


def invariant_causes(run: RunData) -> list[Statement]:
    """Every invariant that rows of token records break, with how many do."""
    steps = {} if run.tokens is None else run.tokens.invariants
    statements = []
    for name, (cause, _) in INVARIANTS_BY_NAME.items():
        checked = {step: counts[name] for step, counts in steps.items() if name in counts}
        broken = [step for step, one in checked.items() if one.rows]
        if not broken or (cause is table.SHIFTED_ROWS and any(run.get("rollout_corr/lag").values)):
            continue  # the lag of all rows says more
        evidence = {
            "count": sum(len(one.rows) for one in checked.values()),
            "rows": sum(one.checked for one in checked.values()),
        }
        if cause is table.SHIFTED_ROWS and evidence["count"] < BOUNDS.shifted_rows * evidence["rows"]:
            continue
        rows = checked[broken[0]].rows
        numbers = first_few(rows, _MOST_NAMED)
        sentence = f"{cause.sentence}; in step {broken[0]} row {numbers}"
        confidence = "named" if evidence["count"] > 1 else "likely"
        statements.append(
            cause_statement(cause, evidence, sentence, confidence=confidence, steps=(broken[0], broken[-1]))
        )
    return statements


def invariant_rows(run: RunData) -> list[Row]:
    """Whether each was checked; empty without token records."""
    if run.tokens is None:
        return []
    checked = {name for counts in run.tokens.invariants.values() for name in counts}
    return [
        Row(cause.row, cause.name, needs, name in checked)
        for name, (cause, needs) in INVARIANTS_BY_NAME.items()
    ]
