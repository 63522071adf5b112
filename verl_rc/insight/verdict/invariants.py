"""The causes that token records show without statistics, and which of them could be checked."""

from verl_rc.algorithm.health import cause_table as table
from verl_rc.algorithm.health.causes import cause_statement
from verl_rc.algorithm.health.statement import Statement
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.run_folder.lines import first_few
from verl_rc.insight.verdict.signatures import CauseRow
from verl_rc.metrics.bounds import BOUNDS

INVARIANTS_BY_NAME = {
    "stop": (table.STOP_LOST, "finished, response_ids and the fact stop_token_ids"),
    "equal": (table.EQUAL_SAMPLES, "response_ids"),
    "vocabulary": (table.OUTSIDE_VOCABULARY, "response_ids"),
    "shifted": (table.SHIFTED_ROWS, "old_log_prob"),
    "floor": (table.FLOORED, "old_log_prob"),
    "mask": (table.OUTSIDE_MASK, ""),
}
"""Cause, and the fields of a token record that its check needs, by its name in ``run_folder.invariants``."""

_MOST_NAMED = 5


def invariant_causes(run: RunData) -> list[Statement]:
    """Every invariant that rows of token records break, with the number of such rows."""
    steps = {} if run.tokens is None else run.tokens.invariants
    statements = []
    for name, (cause, _) in INVARIANTS_BY_NAME.items():
        checked = {step: by_name[name] for step, by_name in steps.items() if name in by_name}
        broken = [step for step, counts in checked.items() if counts.rows]
        if not broken or (cause is table.SHIFTED_ROWS and any(run.get("rollout_corr/lag").values)):
            continue  # the lag of all rows says more
        evidence = {
            "count": sum(len(counts.rows) for counts in checked.values()),
            "rows": sum(counts.checked for counts in checked.values()),
        }
        if cause is table.SHIFTED_ROWS and evidence["count"] < BOUNDS.shifted_rows * evidence["rows"]:
            continue
        rows = first_few(checked[broken[0]].rows, _MOST_NAMED)
        sentence = f"{cause.sentence}; in step {broken[0]} row {rows}"
        confidence = "named" if evidence["count"] > 1 else "likely"
        statements.append(
            cause_statement(cause, evidence, sentence, confidence=confidence, steps=(broken[0], broken[-1]))
        )
    return statements


def invariant_rows(run: RunData) -> list[CauseRow]:
    """Whether each was checked; empty without token records."""
    if run.tokens is None:
        return []
    checked = {name for counts in run.tokens.invariants.values() for name in counts}
    return [
        CauseRow(cause.row, cause.name, needs, name in checked)
        for name, (cause, needs) in INVARIANTS_BY_NAME.items()
    ]
