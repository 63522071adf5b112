"""The causes that signatures name over the steps of a run, and which rows of the table could be checked."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_rc.algorithm.health.cause_table import NOT_A_TEMPERATURE
from verl_rc.algorithm.health.causes import (
    PREFIX,
    SIGNATURE_METRICS,
    cause_of,
    cause_statement,
    signature_statement,
)
from verl_rc.algorithm.health.signature_causes import SIGNATURE_CAUSES, TEMPERATURE, SignatureCause, Step
from verl_rc.algorithm.health.statement import Statement
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.estimates import FEWEST_FOR_TREND, LINEAR, confirm, fit_line
from verl_rc.insight.verdict.gap_series import SUPPORTS
from verl_rc.metrics.bounds import BOUNDS

_TEMPERATURE = "actor_rollout_ref.rollout.temperature"
_IDS = "prompt_ids and response_ids of several samples a prompt"
_FIELDS = {
    "temperature_slope": "entropy",
    "temperature_r2": "entropy",
    "temperature_z": "entropy",
    "prefix_slope": _IDS,
    "prefix_r2": _IDS,
    "prefix_z": _IDS,
    "prefix_spread": _IDS,
    "surprisal_excess": "entropy",
    "surprisal_excess_bound": "varentropy",
    "logit_noise": "sum_pi_squared",
    "noisiest_engine": "engine",
    "noisiest_engine_ratio": "engine",
    "noisiest_engine_z": "engine",
}
"""Fields of a token record that a metric needs beside both log-probs and the mask."""


@dataclass(frozen=True)
class CauseRow:
    """One row of the table of causes, and whether a run has the metrics that its rule reads."""

    number: int
    cause: str
    needs: str
    """Fields of a token record, in words; empty where both log-probs and the mask are enough."""
    is_asked: bool


def has_signatures(run: RunData) -> bool:
    """Whether the run has the metrics that ``health.causes`` judges."""
    return run.has(f"{PREFIX}missing_mass")


def signature_causes(run: RunData) -> list[Statement]:
    """The causes of ``health.causes`` that held in two neighbouring steps."""
    steps, metrics = run.get(f"{PREFIX}missing_mass").steps, _by_step(run)
    mirrors = run.has(SUPPORTS)
    causes, statements = [cause_of(step_metrics, mirrors) for step_metrics in metrics], []
    facts = {} if run.tokens is None else run.tokens.facts
    temperatures = (run.settings.get(_TEMPERATURE), facts.get("temperature"))
    temperature = next((value for value in temperatures if isinstance(value, int | float)), 1.0)
    for cause in SIGNATURE_CAUSES:
        marks = Series(steps, [float(step_cause is cause) for step_cause in causes])
        if (confirmed := confirm(marks, bool)) is not None:
            examples = [
                step_metrics
                for step_metrics, step_cause in zip(metrics, causes, strict=True)
                if step_cause is cause
            ]
            statement = signature_statement(cause, examples, float(temperature), confirmed.steps)
            statements.append(_checked_temperature(statement, run) if cause is TEMPERATURE else statement)
    return statements


def _checked_temperature(statement: Statement, run: RunData) -> Statement:
    """The statement about a temperature, or about a gap that only resembles one.

    A temperature makes a straight line over log-probs, with one slope in all steps.
    """
    assert statement.steps is not None, "a signature cause has steps"
    reasons, evidence = [], dict(statement.evidence)
    name = "temperature_slope" if run.has(f"{PREFIX}temperature_slope") else "prefix_slope"
    slopes = run.get(f"{PREFIX}{name}").between(0, statement.steps[1])
    line = fit_line(slopes.steps, slopes.values) if len(slopes) >= FEWEST_FOR_TREND else None
    if line is not None and line.r_squared > LINEAR:
        first, last = (line.intercept + line.slope * step for step in (slopes.steps[0], slopes.steps[-1]))
        if abs(last - first) > max(
            BOUNDS.temperature_slope, BOUNDS.steady_slope * max(abs(first), abs(last))
        ):
            reasons.append("its slope grows from {first:.3f} to {last:.3f} over the run")
            evidence |= {"first": first, "last": last}
    bend = None if run.tokens is None else run.tokens.bend
    if bend is not None and abs(bend.z) > BOUNDS.z and bend.share > BOUNDS.bend:
        reasons.append("it is no straight line: its bend explains {bend:.0%} more, z {bend_z:.0f}")
        evidence |= {"bend": bend.share, "bend_z": bend.z}
    if not reasons:
        return statement
    sentence = (
        "The gap follows the trainer's log-probs (slope {temperature_slope:.3f}, which explains "
        "{temperature_r2:.0%} of it), but not as another temperature does: " + ", and ".join(reasons)
    )
    return cause_statement(NOT_A_TEMPERATURE, evidence, sentence, confidence="likely", steps=statement.steps)


def signature_rows(run: RunData) -> list[CauseRow]:
    """Every row that signatures name, in the order in which their rules are checked."""
    kinds_of_steps = {tuple(metrics): metrics for metrics in _by_step(run)}.values()  # by the names they have
    rows: dict[str, CauseRow] = {}
    for cause in SIGNATURE_CAUSES:
        needs = " and ".join(dict.fromkeys(_record_fields(cause)))
        is_asked = any(cause.evidence_in(metrics) is not None for metrics in kinds_of_steps)
        if (earlier := rows.get(cause.name)) is not None:
            alternatives = dict.fromkeys((*earlier.needs.split(" or "), *needs.split(" or ")))
            needs, is_asked = " or ".join(alternatives), earlier.is_asked or is_asked
        rows[cause.name] = CauseRow(cause.row, cause.name, needs, is_asked)
    return list(rows.values())


def _by_step(run: RunData) -> list[Step]:
    """The signatures of each step that has any."""
    columns = {name: run.get(f"{PREFIX}{name}").by_step() for name in SIGNATURE_METRICS}
    return [
        {name: values[step] for name, values in columns.items() if step in values}
        for step in run.get(f"{PREFIX}missing_mass").steps
    ]


def _record_fields(cause: SignatureCause) -> Iterator[str]:
    """The fields of a token record of which one suffices, in words, for each metric that the cause needs."""
    for name in cause.needs:
        substitute = cause.substitutes.get(name, name)
        if name in _FIELDS and substitute in _FIELDS:
            yield " or ".join(dict.fromkeys((_FIELDS[name], _FIELDS[substitute])))
