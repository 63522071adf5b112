"""The causes that the signatures of a step name: for alerts during a run, for the report after it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_rc.algorithm.health.cause import Cause
from verl_rc.algorithm.health.ranges import CauseEpisode, CauseHistory
from verl_rc.algorithm.health.signature_causes import SIGNATURE_CAUSES, SignatureCause, Step
from verl_rc.algorithm.health.statement import Statement, filled_statement
from verl_rc.metrics.bounds import BOUNDS

PREFIX = "rollout_corr/"
QUIET_STEPS = 3
"""Steps without a cause after which its episode has ended."""
CAUSE = "alerts/cause"
FLOOR = f"{PREFIX}logit_noise_floor"
SIGNATURE_METRICS = tuple(
    sorted({name for cause in SIGNATURE_CAUSES for name in (*cause.needs, *cause.substitutes.values())})
)


def cause_of(step: Step, mirrors_filter: bool = False) -> SignatureCause | None:
    """The first cause whose rule holds, or None. A rule whose metrics are absent does not hold.

    ``mirrors_filter``: the trainer scores tokens over the supports that the engine's filter left, so no cause
    that blames the filter holds.
    """
    for cause in SIGNATURE_CAUSES:
        if not (mirrors_filter and cause.blames_filter):
            evidence = cause.evidence_in(step)
            if evidence is not None and cause.holds(evidence):
                return cause
    return None


def cause_statement(
    cause: Cause, evidence: Mapping[str, float], sentence: str | None = None, **replacements: Any
) -> Statement:
    """The statement of the table about a cause, filled with ``evidence``; ``sentence`` and the fields
    ``replacements`` replace those of the table."""
    fields = {"next_test": cause.next_test, "overrides": cause.overrides, "row": cause.row, **replacements}
    level = fields.pop("level", cause.level)
    return filled_statement("gap", cause.name, level, sentence or cause.sentence, evidence, **fields)


def signature_statement(
    cause: SignatureCause, examples: Sequence[Step], temperature: float, steps: tuple[int, int] | None = None
) -> Statement:
    """The statement about a cause whose rule holds in the steps ``examples``, with the medians of their
    metrics. ``temperature`` is that of the configuration."""
    step_evidence = [metrics for step in examples if (metrics := cause.evidence_in(step)) is not None]
    evidence = {name: statistics.median(step[name] for step in step_evidence) for name in cause.needs}
    evidence["temperature"] = temperature
    if "missing_mass" in evidence:
        evidence["held"] = 1 - evidence["missing_mass"]
        # The sentence says on which side of 1 the mean ratio is.
        evidence["z"] = abs(evidence["missing_mass_z"])
    if "temperature_slope" in evidence:  # 1 - T / T', T' the other temperature
        evidence["other"] = temperature / max(1 - evidence["temperature_slope"], 1e-3)
    confidence = "named" if cause.is_specific else "likely"
    return cause_statement(cause, evidence, steps=steps, confidence=confidence)


@dataclass(frozen=True)
class CauseMessage:
    """The text of an alert about a cause."""

    text: str
    since_step: int
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedCauses:
    """The causes that a step's signatures name."""

    history: CauseHistory
    """The history with this step."""
    has_cause: bool = False
    """Whether a cause holds in this step and held in the step before."""
    messages: Mapping[str, CauseMessage] = field(default_factory=dict)
    """Messages about causes that begin or end with this step, by the cause's name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics to be added to those of the step."""


def name_causes(
    metrics: Mapping[str, float],
    step: int,
    history: CauseHistory,
    temperature: float,
    mirrors_filter: bool = False,
) -> NamedCauses:
    """Name the causes that hold in a step, by its metrics.

    ``temperature``, which sentences name, and ``mirrors_filter`` (see ``cause_of``) are those of the
    configuration.
    """
    # Where the actor corrects, signatures come with the update; with other diagnostics they never come.
    if f"{PREFIX}missing_mass" not in metrics:
        return NamedCauses(history)
    first_noise = history.first_noise
    if f"{PREFIX}logit_noise" in metrics and len(first_noise) < BOUNDS.floor_steps:
        first_noise = (*first_noise, metrics[f"{PREFIX}logit_noise"])
    is_calibrated = len(first_noise) == BOUNDS.floor_steps
    floor = {FLOOR: sum(first_noise) / BOUNDS.floor_steps} if is_calibrated else {}
    step_metrics = {
        name.removeprefix(PREFIX): value
        for name, value in {**metrics, **floor}.items()
        if name.startswith(PREFIX)
    }
    episodes: dict[str, CauseEpisode] = {}
    messages: dict[str, CauseMessage] = {}
    for name, episode in history.episodes.items():
        if step - episode.last < QUIET_STEPS:
            episodes[name] = episode
        elif episode.is_told:
            text = f"ended: seen from step {episode.first} to {episode.last}"
            messages[name] = CauseMessage(text, episode.first)
    cause = cause_of(step_metrics, mirrors_filter)
    if cause is not None:
        episode = episodes.get(cause.name, CauseEpisode(step, step))
        is_confirmed = episode.last == step - 1
        episodes[cause.name] = CauseEpisode(episode.first, step, episode.is_told or is_confirmed)
        if is_confirmed and not episode.is_told:
            statement = signature_statement(cause, [step_metrics], temperature)
            text = f"{statement.sentence} (since step {episode.first}). {statement.next_test}"
            messages[cause.name] = CauseMessage(text, episode.first, statement.evidence)
    holds = cause is not None and episodes[cause.name].is_told
    history = CauseHistory(episodes, first_noise)
    return NamedCauses(history, holds, messages, {**floor, CAUSE: float(holds)})
