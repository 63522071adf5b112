"""THE table of causes: everything that makes engine and trainer differ, in the words that users see.

Alerts, verdict, diagnosis, what-if and docs/see_why.md read it. A row says what the cause is called, what to
do about it, and what names it. The rules that look at a whole run or at replays are in
``verl_rc.insight.verdict``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_rc.health.statement import Level
from verl_rc.metrics.bounds import BOUNDS

Evidence = Literal["tokens", "engines", "run", "replays"]
"""What names a cause: the tokens of single steps, the engines compared, the course of a run, or replays."""
_ROLLOUT = "actor_rollout_ref.rollout"
NO_CORRECTION = "No correction repairs this."
_MISALIGNED = f"|z| > {BOUNDS.z:g}, |missing mass| > {BOUNDS.missing_mass:g}"
_MISSING = f"z > {BOUNDS.z:g}, missing mass > {BOUNDS.missing_mass:g}"
_EXCESS = f"z < -{BOUNDS.z:g}, missing mass < -{BOUNDS.missing_mass:g}"
PROCESSED = "rollout.logprobs_mode=processed_logprobs"
"""verl's key that has the engine report the distribution that it samples from."""
NO_FILTERS = (f"{_ROLLOUT}.top_p=1.0", f"{_ROLLOUT}.top_k=-1")
_Z = ("missing_mass_z", "missing_mass")
_SLOPE = ("temperature_slope", "temperature_r2")
_BEHIND_PREFIXES = {
    "temperature_slope": "prefix_slope",
    "temperature_r2": "prefix_r2",
    "temperature_z": "prefix_z",
}
"""What tells a temperature where entropies are not known."""
Step = Mapping[str, float]
"""The metrics of a step, without their prefix."""


@dataclass(frozen=True)
class Cause:
    """One row of the table."""

    row: int
    """Its number in docs/see_why.md, for people alone: no rule asks for it."""
    name: str
    condition: str
    """When it is named, in words."""
    sentence: str
    """A template; evidence, and words where a number is not enough, fill it. Empty: the rule has several."""
    next_test: str
    """What decides, or what to do."""
    overrides: tuple[str, ...] = ()
    evidence: Evidence = "tokens"
    level: Level = "fault"
    is_repairable: bool = False
    """Whether a correction repairs the bias that it makes."""
    is_specific: bool = True
    """False: something differs, or nothing does, and the metrics do not tell what."""


@dataclass(frozen=True, kw_only=True)
class SignatureCause(Cause):
    """A cause that the signatures of a single step name."""

    needs: tuple[str, ...]
    """Metrics without which nothing is claimed; their medians, and numbers derived from them, fill the
    sentence."""
    instead: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Metrics that serve where those of ``needs`` are not there."""
    holds: Callable[[Step], bool]
    """The rule; in ``condition`` z is missing_mass_z, R² temperature_r2."""

    def seen_in(self, step: Step) -> Step | None:
        """The metrics that it needs, by their names in ``needs``; None where one is not there."""
        names = {name: name if name in step else self.instead.get(name, name) for name in self.needs}
        is_asked = all(name in step for name in names.values())
        return {need: step[name] for need, name in names.items()} if is_asked else None


def _is_misaligned(step: Step) -> bool:
    return abs(step["missing_mass_z"]) > BOUNDS.z and abs(step["missing_mass"]) > BOUNDS.missing_mass


def _misses_mass(step: Step) -> bool:
    return _is_misaligned(step) and step["missing_mass"] > 0


def _is_of_likely_tokens(step: Step) -> bool:
    """Whether the missing mass is that of unlikely tokens, or may be: a filter keeps the likely ones.

    What is kept is likelier than what is expected then, in every place, and has l below 0: the slope is
    negative. A banned token takes most where it is likely itself, and what is kept is not.
    """
    return step["temperature_r2"] <= BOUNDS.temperature_r2 or step["temperature_slope"] < 0


def _is_temperature(step: Step) -> bool:
    """Whether a temperature explains a clear part of the gap, and nearly all of it, or all but what rounding
    may make.

    Another model moves the tails of distributions, too.
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
    instead=_BEHIND_PREFIXES,
    holds=lambda step: (
        _is_misaligned(step)
        and step["temperature_r2"] > BOUNDS.raw_r2
        and step["temperature_slope"] < BOUNDS.largest_slope
    ),
)
FILTER = SignatureCause(
    5,
    "sampling filter not mirrored",
    (
        f"{_MISSING}, R² ≤ {BOUNDS.temperature_r2:g}, or ≤ {BOUNDS.raw_r2:g} and slope < 0; concentration ≤ "
        f"{BOUNDS.concentration:g}"
    ),
    (
        "The engine samples from fewer tokens than the trainer counts: they hold {kept:.1%} of its "
        "probability, z {z:.0f}"
    ),
    (f"Drop the filter (top_p, top_k, min_p), or mirror it in the trainer. {NO_CORRECTION}"),
    NO_FILTERS,
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
        "The log-probs do not belong to the sampled tokens: the mean ratio is {kept:.4f} instead of 1, z "
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
    "The tokens were not drawn from what the engine reports: the mean ratio is {kept:.4f} instead of 1, z "
    "{z:.0f}",
    (
        "Run ten steps without filters and with the log-probs of the distribution that is sampled (verl: "
        f"{PROCESSED}). z within ±{BOUNDS.z:g} then: that was it. If not, look for banned tokens "
        f"(min_tokens, stop, ignore_eos, logit bias), then compare ids. {NO_CORRECTION}"
    ),
    NO_FILTERS,
    is_specific=False,
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
            "The engine samples from fewer tokens than the trainer counts: they hold {kept:.1%} of its "
            "probability, z {z:.0f}; tokens behind the same prefix lack the same share"
        ),
        (
            "Drop filters (top_p, top_k, min_p) and what bans tokens (min_tokens, stop, ignore_eos, logit "
            f"bias), or mirror them in the trainer. {NO_CORRECTION}"
        ),
        NO_FILTERS,
        is_specific=False,
        needs=(*_Z, "prefix_spread"),
        holds=lambda step: _misses_mass(step) and step["prefix_spread"] <= BOUNDS.prefix_spread,
    ),
    replace(
        OTHER_TOKENS,
        condition=f"{_EXCESS}, behind equal prefixes R² ≤ {BOUNDS.raw_r2:g}; without entropies",
        needs=(*_Z, "prefix_r2"),
        holds=lambda step: _is_misaligned(step) and step["missing_mass"] < 0,
    ),
    FILTER_OR_RAW,
    RAW_OR_OTHER_TOKENS,
    SignatureCause(
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
        (f"Set both to one value; if they are equal, look for a repetition penalty. {NO_CORRECTION}"),
        needs=("temperature_z", *_SLOPE, "logit_noise"),
        instead=_BEHIND_PREFIXES | {"logit_noise": "logit_noise_most"},
        holds=_is_temperature,
    ),
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
        instead={"logit_noise": "logit_noise_least"},
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
"""In the order in which they are asked."""

STOP_LOST = Cause(
    21,
    "finished rows without a stop token",
    "token records: the last id of a finished row is no stop token",
    (
        "{count:.0f} of {rows:.0f} rows that are called finished do not end with a stop token: ids were lost "
        "between engine and trainer, or rows are not what they are called"
    ),
    (
        "Compare the ids that the engine returned with those that were trained on, at the ends of rows. "
        f"{NO_CORRECTION}"
    ),
)
EQUAL_SAMPLES = Cause(
    22,
    "one sample for several requests",
    f"token records: equal ids in a step, by chance at most once in {1 / BOUNDS.chance:,.0f}",
    (
        "{count:.0f} of {rows:.0f} rows have the ids of another row, which independent requests would not "
        "get: an answer was used twice, or requests share a seed"
    ),
    f"Look at how answers are matched to requests, and at the seeds of requests. {NO_CORRECTION}",
)
OUTSIDE_VOCABULARY = Cause(
    23,
    "ids outside the vocabulary",
    "token records: an id below 0, or not below vocab_size",
    "{count:.0f} of {rows:.0f} rows have ids that are none of the vocabulary's",
    (
        "Look for padding or marks of missing tokens among the ids, and compare the tokenizers of engine and "
        f"trainer. {NO_CORRECTION}"
    ),
)
SHIFTED_ROWS = Cause(
    2,
    "log-probs of some rows shifted",
    (
        f"token records: log-probs of a row are {1 / BOUNDS.row_lag:g} times nearer to those of the tokens "
        "beside their own"
    ),
    (
        "In {count:.0f} of {rows:.0f} rows the engine's log-probs agree with those of the tokens beside "
        "their own, and not with their own"
    ),
    f"Compare the ids of these rows that were sampled with those that were trained on. {NO_CORRECTION}",
)
INVARIANTS = (STOP_LOST, EQUAL_SAMPLES, OUTSIDE_VOCABULARY, SHIFTED_ROWS)
"""What token records show without statistics."""
OVERFLOW = Cause(
    1,
    "overflow or empty logits",
    "non-finite or clamped log-ratios",
    (""),
    ("Run ten steps with the engine in float32; if it stays, look at the logits of the longest rows."),
    overrides=(f"{_ROLLOUT}.dtype=float32",),
    evidence="tokens",
)
STALENESS = Cause(
    16,
    "staleness",
    "√k3 is linear in age",
    (
        "The gap grows with the age of a token, {slope:.4f} nats per update: {floor:.4f} at the youngest, "
        "{at:.4f} at age {oldest:.0f} (r² {r:.2f})"
    ),
    ("Correct it with token weights, or let the engines be fewer updates behind."),
    evidence="run",
    level="notice",
    is_repairable=True,
)
DRIFT = Cause(
    17,
    "drift within the step",
    "bypass mode: over all updates of a step √(2 k3) > 0.02 and 2 times the logit noise before the first",
    (
        "Over all updates of a step the policy is {drift:.4f} nats a token from the log-probs that it was "
        "sampled with; before the first one logit noise is {noise:.4f} ({count:.0f} of {steps:.0f} steps). "
        "It moves away while it learns from the batch"
    ),
    ("Fewer updates a step (larger mini-batches, one epoch), a lower learning rate or a tighter clip."),
    evidence="run",
    level="notice",
    is_repairable=True,
)
WEIGHTS_NEVER_ARRIVE = Cause(
    18,
    "weights never arrive",
    "the gap is linear in all that was learned",
    (
        "The gap grows with all that the policy has learned, from {first:.4f} to {last:.4f} nats: "
        "{slope:.2f} for each nat of movement, r² {r:.2f}. The engine has kept the weights it started with"
    ),
    (
        "Compare a tensor of the engine with the trainer's after a sync; verl_rc's canary compares log-probs "
        f"at every update with canary_freq=1. {NO_CORRECTION}"
    ),
    evidence="run",
)
ONE_VERSION_LATE = Cause(
    19,
    "one version late",
    "the gap follows the update before",
    (
        "The gap follows the update before it (r² {r:.2f}): {gap:.4f} nats on average, {first:.4f} in the "
        "first step, which had none. The engine samples with weights that are one update old"
    ),
    ("Look at the order of weight update and sampling; wait for the sync before the next batch."),
    evidence="run",
)
MISSED_UPDATE = Cause(
    19,
    "an update was missed",
    "logit noise jumps to 4 times that of the start in single steps",
    (
        "Logit noise was {peak:.3f} in step {step:.0f} or after ({count:.0f} of {steps:.0f} steps), "
        "{first:.3f} at the start, and as before in between: the engine sampled those steps with other "
        "weights"
    ),
    (
        "verl-rc diagnose RUN --replay R3 says with which, where checkpoints were kept; look at the log for "
        "what delayed or skipped a weight update."
    ),
    evidence="run",
    level="notice",
)
ROUNDING = Cause(
    11,
    "rounding",
    "none, gap as at the start",
    (""),
    (""),
    evidence="run",
    level="good",
    is_repairable=True,
    is_specific=False,
)
LARGE = Cause(
    20,
    "large from the start, cause not separable by metrics",
    "logit noise of the first steps is 4 times what rounding makes in this precision",
    (""),
    (
        "verl-rc diagnose RUN --replay tells a trainer that scores other inputs (prompts, padding, dropout) "
        "from an engine that computes otherwise."
    ),
    evidence="run",
    is_repairable=True,
    is_specific=False,
)
GROWN = Cause(
    20,
    "grown, cause not separable by metrics",
    "none, gap grown",
    (""),
    (
        "Weights that differ a little, trainer noise (dropout), routing and kernels look alike here. Run ten "
        "steps with the engine in float32 and without prefix caching, one change at a time."
    ),
    overrides=(f"{_ROLLOUT}.dtype=float32", f"{_ROLLOUT}.enable_prefix_caching=False"),
    evidence="run",
    is_repairable=True,
    is_specific=False,
)
OTHER_INPUTS = Cause(
    15,
    "the trainer scores other inputs or with noise",
    "R0: the trainer's recorded log-probs do not come out again",
    (""),
    (
        "Compare prompts, positions and masks of the trainer's forward pass with the recorded ids; turn "
        "dropout off."
    ),
    evidence="replays",
)
STALE_CACHE = Cause(
    14,
    "stale prefix cache",
    "R4: a prefix cache filled by older weights explains the engine twice as well",
    (
        "An engine with weights {said:.0f} whose prefix cache was filled by weights {filled:.0f} "
        "({cached:.0f} tokens of prompts come from there) is {left:.4f} nats from the log-probs of step "
        "{step:.0f}, with a cache of its own {own:.4f}"
    ),
    ("Reset the prefix cache after every weight update, or turn it off and compare."),
    overrides=(f"{_ROLLOUT}.enable_prefix_caching=False",),
    evidence="replays",
)
OLDER_WEIGHTS = Cause(
    18,
    "older weights",
    "R3: older weights explain the engine at least twice as well",
    (
        "The engine sampled step {step:.0f} with weights near version {held:.0f} and not {said:.0f}: its "
        "log-probs are {left:.4f} nats from those, {gap:.4f} from these"
    ),
    (
        "Compare a tensor of the engine with the trainer's after a sync; look at what skips or delays a "
        "weight update."
    ),
    overrides=(f"{_ROLLOUT}.sync_proof.canary_freq=1",),
    evidence="replays",
)
ENGINES_INPUTS = Cause(
    20,
    "the engine was given other inputs",
    "the engine's log-probs come out with a mistake in its inputs",
    (""),
    ("Compare the ids that the engine was sent with the recorded ones: templates, start tokens, padding."),
    evidence="replays",
    is_repairable=True,
)
OTHER_ENGINE = Cause(
    20,
    "the engine had other prompts, sampling, cache or weights",
    "a replayed engine is farther from the recorded one than rounding makes",
    (
        "An engine with the right weights that is given the tokens of step {step:.0f} is {size:.4f} nats "
        "from what the run's engine reported ({first:.4f} at the start), where rounding makes "
        "{rounding:.4f}; {share:.0%} of the gap"
    ),
    (
        "Compare the ids and the sampling parameters that the engine was sent with the recorded ids and the "
        "configuration; then restart the engine and compare its tensors with the trainer's after a sync."
    ),
    overrides=(f"{_ROLLOUT}.enable_prefix_caching=False", f"{_ROLLOUT}.sync_proof.canary_freq=1"),
    evidence="replays",
    is_repairable=True,
)
OTHER_CODE = Cause(
    20,
    "the engine's code computes otherwise than the trainer's",
    "R2: with equal weights, in float32 and row by row, engine and trainer differ",
    (
        "With the weights of step {step:.0f}, in float32 and one row at a time, the engine is {kernels:.4f} "
        "nats from the trainer: {share:.0%} of the gap is neither rounding nor weights"
    ),
    (
        "Compare what both make of the model's configuration (rotary base, scaling, experts, merged "
        "adapters), then try other kernels of attention in the engine."
    ),
    evidence="replays",
    is_repairable=True,
)

RUN_CAUSES = (
    OVERFLOW,
    STALENESS,
    DRIFT,
    WEIGHTS_NEVER_ARRIVE,
    ONE_VERSION_LATE,
    MISSED_UPDATE,
    ROUNDING,
    LARGE,
    GROWN,
)
"""Causes that the report names from the course of a run."""
REPLAY_CAUSES = (OTHER_INPUTS, STALE_CACHE, OLDER_WEIGHTS, ENGINES_INPUTS, OTHER_ENGINE, OTHER_CODE)
CAUSES: Mapping[str, Cause] = {
    cause.name: cause for cause in (*INVARIANTS, *SIGNATURE_CAUSES, *RUN_CAUSES, *REPLAY_CAUSES)
}
"""The whole table by name."""
