"""Bounds of the gap's signatures: what each of them looks at, and from which value on it names a cause.

They are stated here alone: ``verl_rc.metrics.signatures`` measures with them and the causes of a gap are
judged by them; formulas and healthy ranges of the catalogue, and the table of causes in docs/see_why.md, are
filled from them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SignatureBounds:
    """Numbers that several signatures or causes share; nats where nothing else is said."""

    lags: tuple[int, ...] = (-2, -1, 0, 1, 2)
    """Positions between a token and the rollout log-prob that is compared with its own."""
    lag_distance: float = 0.05
    """A shift is looked for if the mean distance of log-probs is above this: the log-probs of nearly certain
    tokens are all alike."""
    row_lag: float = 0.1
    """A single row is shifted if a shift brings its mean distance below this share of that without a shift.
    """
    shifted_rows: float = 0.01
    """Share of the rows up to which shifted rows are chance: beside old weights, 1 of 5,715 rows was one."""
    chance: float = 1e-6
    """Equal samples in a step are a fault if chance makes them with at most this probability."""
    head: int = 8
    """Shifts and rounding are looked for in so many first positions of a response: they would be in all."""
    rounded_bits: int = 13
    """Last bits of float32: all 0 in one of 8,192 numbers, and in all numbers that were float16 or bfloat16
    before."""
    rounded_fraction: float = 0.99
    position_edges: tuple[int, ...] = (16, 256)
    """Positions in the response at which the next bucket of logit noise begins."""
    z: float = 6.0
    """Standard errors from which on a deviation is no chance. A heavy tail alone reaches 3."""
    missing_mass: float = 1e-3
    """A smaller missing mass does not count: rounding of float32 alone can make it many standard errors."""
    temperature_z: float = 30.0
    temperature_slope: float = 0.003
    temperature_r2: float = 0.3
    """Share of the squared gap that a temperature must explain. A drifting policy sharpens too, which
    explains 0.08; a temperature 2 % off beside fp8 weights explains 0.3."""
    raw_r2: float = 0.9
    """Share of the squared gap above which the gap is that of a temperature in the log-probs of one side
    alone. A banned token explains less; a sampling filter at most ``temperature_r2``."""
    largest_slope: float = 0.9
    """A slope of this or more is no temperature: it would be ten times the trainer's, at which nobody
    samples. Log-probs of other tokens have a slope of 1."""
    steady_slope: float = 0.15
    """Share of itself by which the slope of a temperature may change over a run. Between flat and nearly
    certain policies, that of half the trainer's temperature changed by 0.12, that of 0.7 times by 0.04."""
    bend: float = 0.02
    """Share of the squared gap: if the bend of the gap over log-probs explains it, no temperature makes the
    gap. With half the trainer's temperature it explained 0.006, with 0.7 or 2 times 0.0001."""
    prefix_spread: float = 0.5
    """Spread up to which the gap counts as the same for all tokens behind a prefix. In planted runs noise had
    0.87 to 1.14, top-p 0.95 beside noise of bfloat16 0.22 to 0.31."""
    fewest_shared: int = 64
    """Degrees of freedom (tokens behind shared prefixes − prefixes) that a temperature is read from at least.
    """
    largest_share: float = 0.01
    """Share of the tokens, those with the largest gap, that concentration looks at."""
    concentration: float = 0.9
    """Share of the squared gap above which these tokens make it; rounding alone reaches 0.6 in the first
    steps."""
    few_tokens: float = 0.98
    """Share from which on few tokens alone make the gap. Rounding reached 0.94 in two steps in a row, where a
    policy was certain of most tokens."""
    floor_steps: int = 2
    """First steps of a run whose mean logit noise is its floor."""
    above_floor: float = 2.0
    """A gap of at most so many times that of the first steps is rounding."""
    part_share: float = 0.15
    """Share of the gap's variance from which on the trainer's part of it, found by a replay, is a cause."""
    reproduced: float = 1e-3
    """Log-probs of the trainer that differ by at most so many nats count as equal: other batches round
    otherwise."""
    implausible_noise: float = 0.5
    """Logit noise that rounding makes in no precision in the first steps; with fp8 it can where a policy
    grows certain."""
    drift: float = 0.02
    """Root mean square of the log-ratio over the updates of a step from which on it counts: a tenth of the
    usual clip range."""
    survival: float = 0.5
    """Share of an update that rounding in the engines leaves, along it, below which it counts as lost. It was
    0.95 to 1.08 with every rate and engine tried, and 0 where each weight moved by less than half a number
    of fp8."""
    fewest_survivals: int = 3
    """Survival is judged from so many measured steps on: single steps may be chance."""
    engines: int = 16
    """Number of engines whose noise is measured one by one; the last one stands for all later ones too."""
    engine_noise: float = 2.0
    """An engine is unlike the others when it has more than so many times their logit noise."""
    engine_z: float = 3.0
    """Standard errors by which its squared noise is above that. Few suffice: the gap of an engine with other
    weights varies."""
    far_above_floor: float = 4.0
    """A gap of more than so many times that of the first steps is a fault. The limit of ``sync_proof`` is
    calibrated by it too."""


BOUNDS = SignatureBounds()

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this many nats before they are exponentiated: e^20 = 4.85e8."""

PLAUSIBLE_NOISE = {
    "float32": 1e-4,
    "float16": 0.01,
    "bfloat16": 0.04,
    "fp8_weights": 0.11,
    "fp8_kv_cache": 0.3,
}
"""Logit noise that rounding of the least precise part of engine and trainer makes, at most so much in the
small models that were measured. Logits of 32 to 64, rounded to bfloat16 on both sides, make 0.1
(docs/experiment_log.md): below ``far_above_floor`` times this, from which on it is called large."""


def least_precise(engine: str, quantization: str | None, kv_cache: str, trainer: str) -> str:
    """The least precise part of an engine and a trainer, as a key of ``PLAUSIBLE_NOISE``.

    ``engine``, ``kv_cache`` and ``trainer`` are dtypes by their names in torch or vLLM.
    """
    parts = [engine, trainer]
    if quantization is not None:
        parts.append("fp8_weights")
    if kv_cache.startswith("fp8"):
        parts.append("fp8_kv_cache")
    return max(parts, key=PLAUSIBLE_NOISE.__getitem__)
