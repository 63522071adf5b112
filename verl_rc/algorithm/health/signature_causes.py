"""The rows of the table of causes that the signatures of a single step name.

A row says what the cause is called, what to do about it, and which rule on the metrics of a step names it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from verl_rc.algorithm.health.cause import NO_CORRECTION, ROLLOUT, Cause
from verl_rc.metrics.bounds import BOUNDS

_MISALIGNED = f"|z| > {BOUNDS.z:g}, |missing mass| > {BOUNDS.missing_mass:g}"
_MISSING = f"z > {BOUNDS.z:g}, missing mass > {BOUNDS.missing_mass:g}"
_EXCESS = f"z < -{BOUNDS.z:g}, missing mass < -{BOUNDS.missing_mass:g}"
PROCESSED = "rollout.logprobs_mode=processed_logprobs"
"""verl's key that has the engine report the distribution that it samples from."""
NO_FILTERS = (f"{ROLLOUT}.top_p=1.0", f"{ROLLOUT}.top_k=-1")
_Z = ("missing_mass_z", "missing_mass")
_SLOPE = ("temperature_slope", "temperature_r2")
_BEHIND_PREFIXES = {
    "temperature_slope": "prefix_slope",
    "temperature_r2": "prefix_r2",
    "temperature_z": "prefix_z",
}
"""The metric that shows a temperature where entropies are not known."""
Step = Mapping[str, float]
"""The metrics of a step, without their prefix."""


@dataclass(frozen=True, kw_only=True)
class SignatureCause(Cause):
    """A cause that the signatures of a single step name."""

    needs: tuple[str, ...]
    """Metrics without which nothing is claimed; their medians, and numbers derived from them, fill the
    sentence."""
    substitutes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Metrics that are read where the step lacks one of ``needs``, by the name of that one."""
    blames_filter: bool = False
    """Whether the cause is a filter that the trainer does not mirror. A trainer that has the engine's
    supports mirrors it."""
    holds: Callable[[Step], bool]
    """The rule; in ``condition`` z is missing_mass_z, R² temperature_r2."""

    def evidence_in(self, step: Step) -> Step | None:
        """The step's metrics by their names in ``needs``, or None if one is missing."""
        names = {name: name if name in step else self.substitutes.get(name, name) for name in self.needs}
        is_complete = all(name in step for name in names.values())
        return {need: step[name] for need, name in names.items()} if is_complete else None


def _is_misaligned(step: Step) -> bool:
    return abs(step["missing_mass_z"]) > BOUNDS.z and abs(step["missing_mass"]) > BOUNDS.missing_mass


def _misses_mass(step: Step) -> bool:
    return _is_misaligned(step) and step["missing_mass"] > 0


def _is_of_likely_tokens(step: Step) -> bool:
    """Whether the missing mass may be that of unlikely tokens, which a filter removes.

    The tokens that a filter keeps are likelier than the expected ones and have log-ratios below 0, so the
    slope is negative. A banned token removes most mass where it is likely itself; the slope is positive then.
    """
    return step["temperature_r2"] <= BOUNDS.temperature_r2 or step["temperature_slope"] < 0


def _is_all_temperature(step: Step) -> bool:
    """Whether a temperature explains nearly all of the gap."""
    return step["temperature_r2"] > BOUNDS.raw_r2 and step["temperature_slope"] < BOUNDS.largest_slope


def _is_temperature(step: Step) -> bool:
    """Whether a temperature explains a clear part of the gap, and rounding may explain the remainder.

    A clear part alone is not enough: another model moves the tails of distributions, too.
    """
    is_clear = (
        abs(step["temperature_z"]) > BOUNDS.temperature_z
        and abs(step["temperature_slope"]) > BOUNDS.temperature_slope
        and step["temperature_slope"] < BOUNDS.largest_slope
    )
    remainder = step["logit_noise"] * math.sqrt(max(1 - step["temperature_r2"], 0.0))
    is_all = step["temperature_r2"] > BOUNDS.raw_r2 or remainder <= BOUNDS.implausible_noise
    return is_clear and step["temperature_r2"] > BOUNDS.temperature_r2 and is_all


RAW_LOG_PROBS = SignatureCause(
    4,
    "raw log-probs at another temperature",
    (f"{_MISALIGNED}, R² > {BOUNDS.raw_r2:g}, slope < {BOUNDS.largest_slope:g}"),
    (
        "The engine samples at temperature {temperature:.2f} and reports log-probs at {other:.2f}: slope "
        "{temperature_slope:.3f}, which explains {temperature_r2:.0%} of the gap, z {z:.0f}"
    ),
    (f"Let it report the distribution that it samples from (verl: {PROCESSED}). {NO_CORRECTION}"),
    needs=(*_Z, *_SLOPE),
    substitutes=_BEHIND_PREFIXES,
    holds=lambda step: _is_misaligned(step) and _is_all_temperature(step),
)
FILTER = SignatureCause(
    5,
    "sampling filter not mirrored",
    (
        f"{_MISSING}, R² ≤ {BOUNDS.temperature_r2:g}, or ≤ {BOUNDS.raw_r2:g} and slope < 0; concentration ≤ "
        f"{BOUNDS.concentration:g}"
    ),
    (
        "The engine samples from fewer tokens than the trainer counts: they hold {held:.1%} of its "
        "probability, z {z:.0f}"
    ),
    (f"Drop the filter (top_p, top_k, min_p), or mirror it in the trainer. {NO_CORRECTION}"),
    NO_FILTERS,
    blames_filter=True,
    needs=(*_Z, *_SLOPE, "concentration"),
    holds=lambda step: (
        _misses_mass(step)
        and step["temperature_r2"] <= BOUNDS.raw_r2
        and _is_of_likely_tokens(step)
        and step["concentration"] <= BOUNDS.concentration
    ),
)
OTHER_TOKENS = SignatureCause(
    7,
    "not the sampled tokens, or not their log-probs",
    (f"{_MISALIGNED}, else"),
    (
        "The log-probs do not belong to the sampled tokens: the mean ratio is {held:.4f} instead of 1, z "
        "{z:.0f}"
    ),
    (
        "Compare the ids that were sampled with those that were trained on: decode and encode, templates, a "
        f"shift by one token. {NO_CORRECTION}"
    ),
    needs=(*_Z, "temperature_r2"),
    holds=_is_misaligned,
)
FILTER_OR_RAW = SignatureCause(
    5,
    "sampling filter, banned token or raw log-probs",
    f"{_MISSING}, without R²",
    "The tokens were not drawn from what the engine reports: the mean ratio is {held:.4f} instead of 1, z "
    "{z:.0f}",
    (
        "Run ten steps without filters and with the log-probs of the distribution that is sampled (verl: "
        f"{PROCESSED}). z within ±{BOUNDS.z:g} then: that was it. If not, look for banned tokens "
        f"(min_tokens, stop, ignore_eos, logit bias), then compare ids. {NO_CORRECTION}"
    ),
    NO_FILTERS,
    is_specific=False,
    blames_filter=True,
    needs=_Z,
    holds=_misses_mass,
)
RAW_OR_OTHER_TOKENS = SignatureCause(
    7,
    "raw log-probs, or not those of the sampled tokens",
    f"{_EXCESS}, without R²",
    FILTER_OR_RAW.sentence,
    (
        "If the temperature is not 1, let the engine report the distribution that it samples from (verl: "
        f"{PROCESSED}). If it is, compare the ids that were sampled with those that were trained on. "
        f"{NO_CORRECTION}"
    ),
    is_specific=False,
    needs=_Z,
    holds=_is_misaligned,
)
TEMPERATURE = SignatureCause(
    8,
    "temperature",
    (
        f"|temperature z| > {BOUNDS.temperature_z:g}, |slope| > {BOUNDS.temperature_slope:g}, slope < "
        f"{BOUNDS.largest_slope:g}, R² > "
        f"{BOUNDS.temperature_r2:g}, logit noise · √(1 - R²) ≤ {BOUNDS.implausible_noise:g} or R² > "
        f"{BOUNDS.raw_r2:g}"
    ),
    (
        "The engine samples at temperature {other:.2f}, the trainer scores at {temperature:.2f}: slope "
        "{temperature_slope:.3f}, which explains {temperature_r2:.0%} of the gap"
    ),
    (
        "Set both to one value; if they are equal, look for a repetition penalty, and ask verl-rc report "
        f"whether it is a temperature in all steps. {NO_CORRECTION}"
    ),
    needs=("temperature_z", *_SLOPE, "logit_noise"),
    substitutes=_BEHIND_PREFIXES | {"logit_noise": "logit_noise_most"},
    holds=_is_temperature,
)

SIGNATURE_CAUSES = (
    SignatureCause(
        2,
        "log-probs shifted",
        "lag is not 0",
        "The engine's log-prob of a token stands {lag:+.0f} positions from the token",
        (f"Compare the ids that were sampled with those that were trained on. {NO_CORRECTION}"),
        needs=("lag",),
        holds=lambda step: step["lag"] != 0,
    ),
    SignatureCause(
        3,
        "log-probs rounded",
        (f"rounded fraction > {BOUNDS.rounded_fraction:g}"),
        (
            "{rounded_fraction:.1%} of the engine's log-probs have no more than 16 bits: they were rounded "
            "on their way"
        ),
        ("Keep them in float32 from the engine to the trainer."),
        needs=("rounded_fraction",),
        holds=lambda step: step["rounded_fraction"] > BOUNDS.rounded_fraction,
    ),
    RAW_LOG_PROBS,
    FILTER,
    SignatureCause(
        6,
        "token banned",
        (f"{_MISSING}, R² > {BOUNDS.temperature_r2:g} and ≤ {BOUNDS.raw_r2:g}, slope ≥ 0"),
        (
            "The engine never samples a token that the trainer expects: {missing_mass:.1%} of its "
            "probability is missing, most where others are unlikely (R² {temperature_r2:.2f}), z {z:.0f}"
        ),
        (
            "Look at min_tokens, stop, ignore_eos and logit bias: drop them, or mirror them in the trainer. "
            f"{NO_CORRECTION}"
        ),
        needs=(*_Z, *_SLOPE),
        holds=lambda step: (
            _misses_mass(step)
            and BOUNDS.temperature_r2 < step["temperature_r2"] <= BOUNDS.raw_r2
            and step["temperature_slope"] >= 0
        ),
    ),
    OTHER_TOKENS,
    SignatureCause(
        5,
        "sampling filter or banned token",
        (
            f"{_MISSING}, spread of the gap behind equal prefixes ≤ {BOUNDS.prefix_spread:g}; "
            "without entropies"
        ),
        (
            "The engine samples from fewer tokens than the trainer counts: they hold {held:.1%} of its "
            "probability, z {z:.0f}; tokens behind the same prefix lack the same share"
        ),
        (
            "Drop filters (top_p, top_k, min_p) and what bans tokens (min_tokens, stop, ignore_eos, logit "
            f"bias), or mirror them in the trainer. {NO_CORRECTION}"
        ),
        NO_FILTERS,
        is_specific=False,
        blames_filter=True,
        needs=(*_Z, "prefix_spread"),
        holds=lambda step: _misses_mass(step) and step["prefix_spread"] <= BOUNDS.prefix_spread,
    ),
    replace(
        OTHER_TOKENS,
        condition=(
            f"{_EXCESS}, behind equal prefixes R² ≤ {BOUNDS.raw_r2:g} or slope ≥ {BOUNDS.largest_slope:g}; "
            "without entropies"
        ),
        needs=(*_Z, *_SLOPE),
        substitutes=_BEHIND_PREFIXES,
        holds=lambda step: (
            _is_misaligned(step) and step["missing_mass"] < 0 and not _is_all_temperature(step)
        ),
    ),
    FILTER_OR_RAW,
    RAW_OR_OTHER_TOKENS,
    TEMPERATURE,
    SignatureCause(
        10,
        "sampled from another distribution than reported",
        ("|surprisal excess| > its bound"),
        (
            "Sampled tokens have {surprisal_excess:+.3f} nats of surprisal beyond what the trainer expects, "
            "where {surprisal_excess_bound:.3f} are possible for what the engine reports: it samples from "
            "another distribution, though the log-probs agree"
        ),
        (
            f"Let the engine report the distribution that it samples from (verl: {PROCESSED}), and turn "
            f"filters and penalties off. {NO_CORRECTION}"
        ),
        NO_FILTERS,
        needs=("surprisal_excess", "surprisal_excess_bound"),
        holds=lambda step: abs(step["surprisal_excess"]) > step["surprisal_excess_bound"],
    ),
    SignatureCause(
        12,
        "few tokens are others than sampled",
        (f"concentration > {BOUNDS.few_tokens:g}, logit noise > {BOUNDS.implausible_noise:g}"),
        (
            f"{100 * BOUNDS.largest_share:g} % of the tokens make {{concentration:.1%}} of the squared gap, "
            "and logit noise is {logit_noise:.3f}: more, and on fewer tokens, than rounding makes"
        ),
        ("Compare the ids of the worst rows with the sampled ones: decode and encode, templates."),
        needs=("concentration", "logit_noise"),
        substitutes={"logit_noise": "logit_noise_least"},
        holds=lambda step: (
            step["concentration"] > BOUNDS.few_tokens and step["logit_noise"] > BOUNDS.implausible_noise
        ),
    ),
    SignatureCause(
        13,
        "one engine differs from the others",
        (
            f"logit noise of one engine > {BOUNDS.engine_noise:g} times that of the others, by "
            f"{BOUNDS.engine_z:g} standard errors"
        ),
        (
            "What engine {noisiest_engine:.0f} samples has {noisiest_engine_ratio:.1f} times the logit noise "
            "of the other engines: it has other weights, or computes otherwise"
        ),
        (
            "Restart it, and compare one of its tensors with the trainer's after a sync; replay R3 finds the "
            "weights that it had."
        ),
        evidence="engines",
        needs=("noisiest_engine", "noisiest_engine_ratio", "noisiest_engine_z"),
        holds=lambda step: step["noisiest_engine_z"] > BOUNDS.engine_z,
    ),
)
"""Causes in the order in which they are checked."""
