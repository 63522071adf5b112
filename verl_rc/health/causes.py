"""Causes of a gap as data: rows of the decision table in docs/see_why.md that the signatures of single steps
speak to.

The report reads this table after a run and the alerts read it beside one (``judge_causes``), in the same
words. A rule sees the metrics of one step below ``rollout_corr/``; the first that holds names the cause, and
speaks when it holds in two steps in a row.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from verl_rc.health.ranges import CauseEpisode, CauseHistory
from verl_rc.health.statement import Statement, say
from verl_rc.metrics.bounds import BOUNDS

PREFIX = "rollout_corr/"
ENDED_AFTER = 3
"""Steps without a cause after which it has ended."""
CAUSE = "alerts/cause"
FLOOR = f"{PREFIX}logit_noise_floor"
_ROLLOUT = "actor_rollout_ref.rollout"
NO_CORRECTION = "No correction repairs this."
_MISALIGNED = f"|z| > {BOUNDS.z:g}, |missing mass| > {BOUNDS.missing_mass:g}"
_MISSING = f"z > {BOUNDS.z:g}, missing mass > {BOUNDS.missing_mass:g}"
PROCESSED = "rollout.logprobs_mode=processed_logprobs"
"""verl's key that has the engine report the distribution that it samples from."""
NO_FILTERS = (f"{_ROLLOUT}.top_p=1.0", f"{_ROLLOUT}.top_k=-1")
_Z = ("missing_mass_z", "missing_mass")
_SLOPE = ("temperature_slope", "temperature_r2")
Step = Mapping[str, float]
"""The metrics of a step, without their prefix."""


@dataclass(frozen=True)
class Cause:
    """One row of the table."""

    row: int
    name: str
    needs: tuple[str, ...]
    """Metrics without which nothing is claimed; medians of them, and what ``_derived`` adds, fill the
    sentence."""
    holds: Callable[[Step], bool]
    condition: str
    """``holds`` in words: z is missing_mass_z, R² temperature_r2."""
    sentence: str
    next_test: str
    overrides: tuple[str, ...] = ()


def _is_misaligned(step: Step) -> bool:
    return abs(step["missing_mass_z"]) > BOUNDS.z and abs(step["missing_mass"]) > BOUNDS.missing_mass


def _misses_mass(step: Step, least: float, most: float) -> bool:
    """Whether mass is missing, and a temperature explains more than ``least`` and at most ``most`` of the
    gap."""
    return _is_misaligned(step) and step["missing_mass"] > 0 and least < step["temperature_r2"] <= most


def _is_temperature(step: Step) -> bool:
    """Whether a temperature explains a clear part of the gap, and nearly all of it, or all but what rounding
    may make.

    Another model moves the tails of distributions, too.
    """
    is_clear = (
        abs(step["temperature_z"]) > BOUNDS.temperature_z
        and abs(step["temperature_slope"]) > BOUNDS.temperature_slope
    )
    left = step["logit_noise"] * math.sqrt(max(1 - step["temperature_r2"], 0.0))
    is_all = step["temperature_r2"] > BOUNDS.raw_r2 or left <= BOUNDS.implausible_noise
    return is_clear and step["temperature_r2"] > BOUNDS.temperature_r2 and is_all


CAUSES = (
    Cause(
        2,
        "log-probs shifted",
        ("lag",),
        lambda step: step["lag"] != 0,
        "lag is not 0",
        "The engine's log-prob of a token stands {lag:+.0f} positions from the token",
        f"Compare the ids that were sampled with those that were trained on. {NO_CORRECTION}",
    ),
    Cause(
        3,
        "log-probs rounded",
        ("rounded_fraction",),
        lambda step: step["rounded_fraction"] > BOUNDS.rounded_fraction,
        f"rounded fraction > {BOUNDS.rounded_fraction:g}",
        "{rounded_fraction:.1%} of the engine's log-probs have no more than 16 bits: they were rounded on "
        "their way",
        "Keep them in float32 from the engine to the trainer.",
    ),
    Cause(
        4,
        "raw log-probs at another temperature",
        (*_Z, *_SLOPE),
        lambda step: _is_misaligned(step) and step["temperature_r2"] > BOUNDS.raw_r2,
        f"{_MISALIGNED}, R² > {BOUNDS.raw_r2:g}",
        "The engine samples at temperature {temperature:.2f} and reports log-probs at {other:.2f}: slope "
        "{temperature_slope:.3f}, which explains {temperature_r2:.0%} of the gap, z {z:.0f}",
        f"Let it report the distribution that it samples from (verl: {PROCESSED}). {NO_CORRECTION}",
    ),
    Cause(
        5,
        "sampling filter not mirrored",
        (*_Z, *_SLOPE, "concentration"),
        lambda step: (
            _misses_mass(step, -1.0, BOUNDS.temperature_r2) and step["concentration"] <= BOUNDS.concentration
        ),
        f"{_MISSING}, R² ≤ {BOUNDS.temperature_r2:g}, concentration ≤ {BOUNDS.concentration:g}",
        "The engine samples from fewer tokens than the trainer counts: they hold {kept:.1%} of its "
        "probability, z {z:.0f}",
        f"Drop the filter (top_p, top_k, min_p), or mirror it in the trainer. {NO_CORRECTION}",
        NO_FILTERS,
    ),
    Cause(
        6,
        "token banned",
        (*_Z, *_SLOPE),
        lambda step: _misses_mass(step, BOUNDS.temperature_r2, BOUNDS.raw_r2),
        f"{_MISSING}, R² > {BOUNDS.temperature_r2:g} and ≤ {BOUNDS.raw_r2:g}",
        "The engine never samples a token that the trainer expects: {missing_mass:.1%} of its probability is "
        "missing, most where others are unlikely (R² {temperature_r2:.2f}), z {z:.0f}",
        "Look at min_p, min_tokens, stop, ignore_eos and logit bias: drop them, or mirror them in the "
        f"trainer. {NO_CORRECTION}",
    ),
    Cause(
        7,
        "not the sampled tokens, or not their log-probs",
        _Z,
        _is_misaligned,
        f"{_MISALIGNED}, else",
        "The log-probs do not belong to the sampled tokens: the mean ratio is {kept:.4f} instead of 1, z "
        "{z:.0f}",
        "Compare the ids that were sampled with those that were trained on: decode and encode, templates, a "
        "shift by one token. " + NO_CORRECTION,
    ),
    Cause(
        8,
        "temperature",
        ("temperature_z", *_SLOPE, "logit_noise"),
        _is_temperature,
        f"|temperature z| > {BOUNDS.temperature_z:g}, |slope| > {BOUNDS.temperature_slope:g}, R² > "
        f"{BOUNDS.temperature_r2:g}, logit noise · √(1 - R²) ≤ {BOUNDS.implausible_noise:g} or R² > "
        f"{BOUNDS.raw_r2:g}",
        "The engine samples at temperature {other:.2f}, the trainer scores at {temperature:.2f}: slope "
        "{temperature_slope:.3f}, which explains {temperature_r2:.0%} of the gap",
        f"Set both to one value; if they are equal, look for a repetition penalty. {NO_CORRECTION}",
    ),
    Cause(
        10,
        "sampled from another distribution than reported",
        ("surprisal_excess", "surprisal_excess_bound"),
        lambda step: abs(step["surprisal_excess"]) > step["surprisal_excess_bound"],
        "|surprisal excess| > its bound",
        "Sampled tokens have {surprisal_excess:+.3f} nats of surprisal beyond what the trainer expects, "
        "where {surprisal_excess_bound:.3f} are possible for what the engine reports: it samples from "
        "another distribution, though the log-probs agree",
        f"Let the engine report the distribution that it samples from (verl: {PROCESSED}), and turn filters "
        "and penalties off. " + NO_CORRECTION,
        NO_FILTERS,
    ),
    Cause(
        12,
        "few tokens are others than sampled",
        ("concentration", "logit_noise"),
        lambda step: (
            step["concentration"] > BOUNDS.few_tokens and step["logit_noise"] > BOUNDS.implausible_noise
        ),
        f"concentration > {BOUNDS.few_tokens:g}, logit noise > {BOUNDS.implausible_noise:g}",
        f"{100 * BOUNDS.largest_share:g} % of the tokens make {{concentration:.1%}} of the squared gap, and "
        "logit noise is {logit_noise:.3f}: more, and on fewer tokens, than rounding makes",
        "Compare the ids of the worst rows with the sampled ones: decode and encode, templates.",
    ),
    Cause(
        13,
        "one engine differs from the others",
        ("noisiest_engine", "noisiest_engine_ratio", "noisiest_engine_z"),
        lambda step: step["noisiest_engine_z"] > BOUNDS.engine_z,
        f"logit noise of one engine > {BOUNDS.engine_noise:g} times that of the others, by "
        f"{BOUNDS.engine_z:g} standard errors",
        "What engine {noisiest_engine:.0f} samples has {noisiest_engine_ratio:.1f} times the logit noise of "
        "the other engines: it has other weights, or computes otherwise",
        "Restart it, and compare one of its tensors with the trainer's after a sync; replay R3 finds the "
        "weights that it had.",
    ),
)
"""In the order in which they are asked."""
SIGNATURES = tuple(sorted({name for cause in CAUSES for name in cause.needs}))


def cause_of_row(row: int) -> Cause:
    """The cause in a row of the table."""
    return next(cause for cause in CAUSES if cause.row == row)


def cause_of(step: Step) -> Cause | None:
    """The first cause whose rule holds; None if none does. Nothing is claimed from absent metrics."""
    return next(
        (cause for cause in CAUSES if all(name in step for name in cause.needs) and cause.holds(step)), None
    )


def statement_of(
    cause: Cause, seen: Sequence[Step], temperature: float, steps: tuple[int, int] | None = None
) -> Statement:
    """What is said of a cause that was ``seen`` in these steps; ``temperature`` is that of the
    configuration."""
    evidence = {name: statistics.median(step[name] for step in seen) for name in cause.needs}
    filled = evidence | _derived(evidence, temperature)
    said = say(
        "gap",
        cause.name,
        "fault",
        cause.sentence,
        filled,
        steps=steps,
        next_test=cause.next_test,
        row=cause.row,
    )
    return replace(said, overrides=cause.overrides, confidence="named")


def _derived(evidence: Mapping[str, float], temperature: float) -> dict[str, float]:
    """The kept mass, and the temperature T' with the slope 1 - T / T'."""
    derived = {"temperature": temperature}
    if "missing_mass" in evidence:
        derived["kept"] = 1 - evidence["missing_mass"]
        derived["z"] = abs(
            evidence["missing_mass_z"]
        )  # the sentence says on which side of 1 the mean ratio is
    if "temperature_slope" in evidence:
        derived["other"] = temperature / max(1 - evidence["temperature_slope"], 1e-3)
    return derived


@dataclass(frozen=True)
class SaidCause:
    """What is to be said of a cause in a step."""

    text: str
    """Empty: nothing."""
    since_step: int
    evidence: Mapping[str, float] = field(default_factory=dict)


def judge_causes(
    metrics: Mapping[str, float], step: int, history: CauseHistory, temperature: float
) -> tuple[dict[str, SaidCause], dict[str, float], CauseHistory]:
    """What to say of a step by cause, further metrics, and the history with this step.

    ``temperature`` is that of the configuration, which sentences name.
    """
    if (
        f"{PREFIX}missing_mass" not in metrics
    ):  # no signatures: not before the update where the actor corrects, or never
        return {}, {}, history
    first = history.first_noise
    if f"{PREFIX}logit_noise" in metrics and len(first) < BOUNDS.floor_steps:
        first = (*first, metrics[f"{PREFIX}logit_noise"])
    further = {FLOOR: sum(first) / BOUNDS.floor_steps} if len(first) == BOUNDS.floor_steps else {}
    seen = {
        name.removeprefix(PREFIX): value
        for name, value in {**metrics, **further}.items()
        if name.startswith(PREFIX)
    }
    cause, episodes, told = cause_of(seen), dict(history.episodes), dict(_ended(history, step))
    for name in told:
        del episodes[name]
    if cause is not None:
        before = episodes.get(cause.name, CauseEpisode(step, step))
        speaks = before.last == step - 1
        episodes[cause.name] = CauseEpisode(before.first, step, before.is_told or speaks)
        if speaks and not before.is_told:
            said = statement_of(cause, [seen], temperature)
            text = f"{said.sentence} (since step {before.first}). {said.next_test}"
            told[cause.name] = SaidCause(text, before.first, said.evidence)
    holds = cause is not None and episodes[cause.name].is_told
    return told, {**further, CAUSE: float(holds)}, CauseHistory(episodes, first)


def _ended(history: CauseHistory, step: int) -> Iterator[tuple[str, SaidCause]]:
    for name, episode in history.episodes.items():
        if step - episode.last >= ENDED_AFTER:
            text = f"ended: seen from step {episode.first} to {episode.last}" if episode.is_told else ""
            yield name, SaidCause(text, episode.first)
