"""Which cause the signatures of a step name: alerts judge it beside a run, the report after it."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_rc.health.cause import Cause
from verl_rc.health.ranges import CauseEpisode, CauseHistory
from verl_rc.health.signature_causes import SIGNATURE_CAUSES, SignatureCause, Step
from verl_rc.health.statement import Statement, say
from verl_rc.metrics.bounds import BOUNDS

PREFIX = "rollout_corr/"
ENDED_AFTER = 3
"""Steps without a cause after which it has ended."""
CAUSE = "alerts/cause"
FLOOR = f"{PREFIX}logit_noise_floor"
SIGNATURES = tuple(
    sorted({name for cause in SIGNATURE_CAUSES for name in (*cause.needs, *cause.instead.values())})
)


def cause_of(step: Step, mirrors_filter: bool = False) -> SignatureCause | None:
    """The first cause whose rule holds; None if none does. Nothing is claimed from absent metrics, and no
    filter is blamed that the trainer mirrors."""
    asked = (
        (cause, cause.seen_in(step))
        for cause in SIGNATURE_CAUSES
        if not (mirrors_filter and cause.blames_filter)
    )
    return next((cause for cause, seen in asked if seen is not None and cause.holds(seen)), None)


def statement_from(
    cause: Cause, evidence: Mapping[str, float], sentence: str | None = None, **further: Any
) -> Statement:
    """What the table says of a cause, filled with ``evidence``; ``sentence`` and ``further`` fields of the
    statement replace the table's."""
    fields = {
        "next_test": cause.next_test,
        "overrides": cause.overrides,
        "row": cause.row,
        "level": cause.level,
        **further,
    }
    return say("gap", cause.name, fields.pop("level"), sentence or cause.sentence, evidence, **fields)


def statement_of(
    cause: SignatureCause, examples: Sequence[Step], temperature: float, steps: tuple[int, int] | None = None
) -> Statement:
    """The statement about a cause that holds in the steps ``examples``; ``temperature`` is that of the
    configuration."""
    seen = [evidence for step in examples if (evidence := cause.seen_in(step)) is not None]
    evidence = {name: statistics.median(step[name] for step in seen) for name in cause.needs}
    evidence["temperature"] = temperature
    if "missing_mass" in evidence:
        evidence["kept"] = 1 - evidence["missing_mass"]
        # The sentence says on which side of 1 the mean ratio is.
        evidence["z"] = abs(evidence["missing_mass_z"])
    if "temperature_slope" in evidence:  # 1 - T / T', T' the other temperature
        evidence["other"] = temperature / max(1 - evidence["temperature_slope"], 1e-3)
    confidence = "named" if cause.is_specific else "likely"
    return statement_from(cause, evidence, steps=steps, confidence=confidence)


@dataclass(frozen=True)
class SaidCause:
    """The message about a cause in a step."""

    text: str
    """Empty: nothing."""
    since_step: int
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JudgedCauses:
    """What the signatures of a step say."""

    history: CauseHistory
    """With this step."""
    has_cause: bool = False
    """Whether a cause holds: from the second of its steps on."""
    messages: Mapping[str, SaidCause] = field(default_factory=dict)
    """What to say of the step, by cause."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further ones of the step."""


def judge_causes(
    metrics: Mapping[str, float],
    step: int,
    history: CauseHistory,
    temperature: float,
    mirrors_filter: bool = False,
) -> JudgedCauses:
    """Judge a step by its metrics.

    ``temperature``, which sentences name, and ``mirrors_filter``, whether the trainer scores tokens over the
    sets that the engine's filter has kept, are those of the configuration.
    """
    if (
        f"{PREFIX}missing_mass" not in metrics
    ):  # no signatures: not before the update where the actor corrects, or never
        return JudgedCauses(history)
    first = history.first_noise
    if f"{PREFIX}logit_noise" in metrics and len(first) < BOUNDS.floor_steps:
        first = (*first, metrics[f"{PREFIX}logit_noise"])
    further = {FLOOR: sum(first) / BOUNDS.floor_steps} if len(first) == BOUNDS.floor_steps else {}
    step_metrics = {
        name.removeprefix(PREFIX): value
        for name, value in {**metrics, **further}.items()
        if name.startswith(PREFIX)
    }
    cause = cause_of(step_metrics, mirrors_filter)
    statements = dict(_ended(history, step))
    episodes = {name: episode for name, episode in history.episodes.items() if name not in statements}
    if cause is not None:
        before = episodes.get(cause.name, CauseEpisode(step, step))
        is_confirmed = before.last == step - 1
        episodes[cause.name] = CauseEpisode(before.first, step, before.is_told or is_confirmed)
        if is_confirmed and not before.is_told:
            statement = statement_of(cause, [step_metrics], temperature)
            text = f"{statement.sentence} (since step {before.first}). {statement.next_test}"
            statements[cause.name] = SaidCause(text, before.first, statement.evidence)
    holds = cause is not None and episodes[cause.name].is_told
    return JudgedCauses(CauseHistory(episodes, first), holds, statements, {**further, CAUSE: float(holds)})


def _ended(history: CauseHistory, step: int) -> Iterator[tuple[str, SaidCause]]:
    for name, episode in history.episodes.items():
        if step - episode.last >= ENDED_AFTER:
            text = f"ended: seen from step {episode.first} to {episode.last}" if episode.is_told else ""
            yield name, SaidCause(text, episode.first)
