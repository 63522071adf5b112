"""Loops over the tokens of a row, compiled for the CPU: each reads the row once, while it is in the cache.

They add up what ``rows``, ``rejection`` and ``importance`` add up tensor by tensor, to the last few bits; tests hold the two
together. Sums are float64. Every function that adds up names what it returns in the tuple of capitals before it.
"""

import warnings
from collections.abc import Callable
from pickle import UnpicklingError
from typing import NamedTuple, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from verl_rc.correction.context import NUM_AGES, NUM_TURNS
from verl_rc.correction.histogram import BINS_PER_SIDE, SMALLEST
from verl_rc.correction.log_ratio import SAFETY_BOUND

P = ParamSpec("P")
R = TypeVar("R")
Floats = NDArray[np.float32] | NDArray[np.float64]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Integers = NDArray[np.int32] | NDArray[np.int64]

_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
"""Sums may be taken in any order, so that the compiler uses vector instructions. Divisions by 0 are what they are in NumPy."""

_OF_OTHER_FILES = (20.0, 5, 5, 468, 2.0**-25)
"""What the machine code takes from other files. What is kept on disk is renewed when this file changes, and only then."""
if _OF_OTHER_FILES != (SAFETY_BOUND, NUM_AGES, NUM_TURNS, BINS_PER_SIDE, SMALLEST):
    raise RuntimeError(
        f"_OF_OTHER_FILES must hold SAFETY_BOUND, NUM_AGES, NUM_TURNS, BINS_PER_SIDE and SMALLEST, got {_OF_OTHER_FILES}: change "
        f"it with them in {__file__}, so that machine code of before is not used"
    )

DIVERGENCES = ("k1", "k2", "k3")
"""What a rule looks at; the loops know it by its place here."""
K1, K2, K3 = 0, 1, 2
WEIGHED = (None, "token", "sequence", "geometric")
"""``rollout_is``, which the loops know by its place here."""
NOTHING, TOKENS, SEQUENCES, MEANS = 0, 1, 2, 3


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """For other compiled functions; ``py_func`` is the Python it is made from."""
    compiled: Callable[P, R] = numba.njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return compiled


def _compiled_for_python(function: Callable[P, None]) -> Callable[P, None]:
    """Machine code for the types it is called with, kept on disk for the next process; other threads run meanwhile."""
    fresh: Callable[P, None] = numba.njit(**_OPTIONS, nogil=True)(function)
    try:
        kept: Callable[P, None] = numba.njit(**_OPTIONS, nogil=True, cache=True)(function)
    except RuntimeError:  # Numba finds no folder that it may write to
        return fresh

    def compiled(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            kept(*arguments, **named)
        except (OSError, EOFError, UnpicklingError) as error:  # before anything has run: a full disk, a file cut short
            warnings.warn(
                f"machine code kept by Numba must be readable and writable, got {error!r}: it is compiled anew in this process. "
                "Delete its *.nbi and *.nbc files, or name another folder with NUMBA_CACHE_DIR",
                stacklevel=2,
            )
            fresh(*arguments, **named)

    return compiled


class Batch(NamedTuple):
    """What is read, and what is written."""

    train: Floats
    """``[B, T]``, nats."""
    rollout: Floats
    """``[B, T]``, nats."""
    mask: Bytes
    """``[B, T]``."""
    weights: Floats
    """``[B, T]``, all of it is written, or ``[0, 0]`` if nobody wants them."""
    keep: Bytes
    """``[B, T]``, all of it is written: 0 for tokens that a rule rejects, else 1; or ``[0, 0]``."""
    advantages: Floats
    """``[B, T]``, or ``[0, 0]`` if unknown."""
    versions: NDArray[np.int64]
    """Of the weights that sampled each token, ``[B, T]``, or ``[0, 0]`` if unknown."""


class Row(NamedTuple):
    """One row up to its last response token, ``[t]``."""

    mask: Bytes
    logs: Floats
    """Log-ratios, 0 for tokens that are not valid."""
    ones: Floats
    """1 for valid tokens, else 0."""
    bounded: Floats
    """Log-ratios within ±``SAFETY_BOUND``."""
    excess: Doubles
    """``exp(bounded) - 1``."""
    rejected: Bytes
    """How many rules for tokens reject a token."""


class Rules(NamedTuple):
    """Rules for tokens, one element each."""

    kinds: NDArray[np.int64]
    """Place of the divergence in ``DIVERGENCES``."""
    lower: Doubles
    """Smallest accepted statistic; -inf: no bound."""
    upper: Doubles
    """Largest accepted statistic."""
    zero: Doubles
    """What a statistic of 0 is moved to by the bounds."""


class Plan(NamedTuple):
    """What to do with every row. Bounds on log-ratios are rounded to their precision."""

    weighs: int
    """Place of ``rollout_is`` in ``WEIGHED``."""
    is_band: bool
    """Weights outside the bounds are 0; otherwise they are cut at the upper one."""
    lowest: float
    """Smallest weight within the band."""
    highest: float
    """Largest weight within the bounds."""
    log_low: float
    """Logarithm of the smallest weight within the bounds."""
    log_high: float
    """Logarithm of the largest weight within the bounds."""
    log_veto: float
    """Log-ratios below are catastrophic; -inf: none is."""
    sums_k2: bool
    """Whether a rule for rows looks at k2."""
    sums_k3: bool
    """Whether a rule for rows looks at k3."""
    full: bool
    """Whether to measure what ``diagnostics=full`` shows."""
    current_version: int
    """What ages count from."""
    bits: Integers
    """Empty, and as wide as the log-probs."""


@_compiled
def _expm1(x: float) -> float:
    """``exp(x) - 1`` for ``|x| <= 20``, within 1e-14 of its value: Taylor's series at x/64, then six times (1+e)^2 - 1 = e (e+2).

    The compiler makes vector instructions of it; a call of the C library takes a token at a time.
    """
    r = x * (1.0 / 64.0)
    p = 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    e = p * r
    e = e * (e + 2.0)
    e = e * (e + 2.0)
    e = e * (e + 2.0)
    e = e * (e + 2.0)
    e = e * (e + 2.0)
    return e * (e + 2.0)


GAP = ("tokens", "response_tokens", "log_ratio", "train")


@_compiled
def _clean(train: Floats, rollout: Floats, mask: Bytes, logs: Floats, ones: Floats) -> tuple[float, ...]:
    """Log-ratios, and 1 for valid tokens, to ``logs`` and ``ones``; both are 0 elsewhere."""
    tokens = response_tokens = log_ratio = train_sum = 0.0
    for t in range(len(train)):
        difference = train[t] - rollout[t]
        in_response = mask[t] != 0
        valid = in_response & (abs(difference) < np.inf)
        logs[t] = difference if valid else 0.0
        ones[t] = 1.0 if valid else 0.0
        tokens += ones[t]
        response_tokens += 1.0 if in_response else 0.0
        log_ratio += np.float64(logs[t])
        train_sum += np.float64(train[t]) if valid else 0.0
    return tokens, response_tokens, log_ratio, train_sum


EXPONENTIALS = ("bounded", "excess", "excess_square", "safety_clamped", "not_exact", "catastrophic")


@_compiled
def _exponentiate(logs: Floats, bounded: Floats, excess: Doubles, log_veto: float) -> tuple[float, ...]:
    """Bounded log-ratios, and ``exp(bounded) - 1``, to ``bounded`` and ``excess``."""
    bounded_sum = excess_sum = square = clamped = not_exact = catastrophic = 0.0
    for t in range(len(logs)):
        bounded[t] = min(max(logs[t], -SAFETY_BOUND), SAFETY_BOUND)
        e = _expm1(np.float64(bounded[t]))
        excess[t] = e
        bounded_sum += np.float64(bounded[t])
        excess_sum += e
        square += e * e
        clamped += 1.0 if bounded[t] != logs[t] else 0.0
        not_exact += 1.0 if logs[t] != 0.0 else 0.0
        catastrophic += 1.0 if logs[t] < log_veto else 0.0
    return bounded_sum, excess_sum, square, clamped, not_exact, catastrophic


WEIGHTS = ("weight.excess", "weight.excess_square", "weight.square", "weight.raw_square", "weight.high", "weight.low")


@_compiled
def _weigh(logs: Floats, ones: Floats, excess: Doubles, weights: Doubles, plan: Plan) -> tuple[float, ...]:
    """Weights after the threshold to ``weights``; 0 for tokens that are not valid."""
    lowest_excess, highest_excess = plan.lowest - 1.0, plan.highest - 1.0
    excess_sum = excess_square = square = raw_square = high = low = 0.0
    for t in range(len(logs)):
        one, raw = np.float64(ones[t]), excess[t]
        inside = (raw >= lowest_excess) & (raw <= highest_excess)
        x = (raw if inside else -1.0) if plan.is_band else min(raw, highest_excess)
        x *= one
        weights[t] = x + one
        excess_sum += x
        excess_square += x * x
        square += (x + one) * (x + one)
        raw_square += (raw + one) * (raw + one)
        high += one if logs[t] > plan.log_high else 0.0
        low += one if logs[t] < plan.log_low else 0.0
    return excess_sum, excess_square, square, raw_square, high, low


@_compiled
def _row_weight(column: Doubles, plan: Plan) -> float:
    """Weight of a whole row after the threshold."""
    log = column[_LOG_RATIO] if plan.weighs == SEQUENCES else column[_LOG_RATIO] / max(column[_TOKENS], 1.0)
    weight: float = np.exp(min(max(log, -SAFETY_BOUND), SAFETY_BOUND))
    if plan.is_band:
        return weight if (weight >= plan.lowest) & (weight <= plan.highest) else 0.0
    return min(weight, plan.highest)


@_compiled
def _divergence(kind: int, bounded: Floats, excess: Doubles, statistic: Doubles) -> None:
    """k1, k2 or k3 of every token to ``statistic``, the first two with the precision of the log-ratios."""
    for t in range(len(bounded)):
        if kind == K1:
            statistic[t] = -np.float64(bounded[t])
        elif kind == K2:
            statistic[t] = 0.5 * np.float64(bounded[t] * bounded[t])
        else:
            statistic[t] = max(excess[t] - np.float64(bounded[t]), 0.0)


RULE = ("total", "clamped", "clamped_square", "above", "below")


@_compiled
def _judge(statistic: Doubles, ones: Floats, rejected: Bytes, bounds: tuple[float, float, float]) -> tuple[float, ...]:
    """Sums of a rule's statistic, as it is and moved to the bounds; ``rejected`` counts it for tokens beyond them."""
    lower, upper, zero = bounds
    total = clamped = clamped_square = above = below = 0.0
    for t in range(len(statistic)):
        value, one = statistic[t], np.float64(ones[t])
        total += value
        x = min(max(value, lower), upper) - zero
        clamped += x
        clamped_square += x * x
        beyond, short = (value > upper) & (one > 0.0), (value < lower) & (one > 0.0)
        above += 1.0 if beyond else 0.0
        below += 1.0 if short else 0.0
        rejected[t] += np.uint8(beyond | short)
    return total, clamped, clamped_square, above, below


EXTREMES = ("statistic.max", "negated.max")


@_compiled
def _extremes(values: Floats, bits: Integers, ones: Floats) -> tuple[float, float]:
    """Largest value of a valid token, and minus the smallest one; ``bits`` are the integers that ``values`` look like.

    Floats have the order of their bits, of which negative ones turn all but the sign; the largest of integers is found with
    vector instructions, that of floats is not.
    """
    rest = bits.dtype.type(np.iinfo(bits.dtype).max)
    sign = bits.dtype.type(8 * bits.itemsize - 1)
    largest, smallest = -rest, rest
    for t in range(len(values)):
        place = bits[t] ^ ((bits[t] >> sign) & rest)
        largest = max(largest, place if ones[t] > 0.0 else -rest)
        smallest = min(smallest, place if ones[t] > 0.0 else rest)
    found = np.empty(2, bits.dtype)
    found[0], found[1] = largest ^ ((largest >> sign) & rest), smallest ^ ((smallest >> sign) & rest)
    extremes = found.view(values.dtype)
    return np.float64(extremes[0]), -np.float64(extremes[1])


@_compiled
def _total(values: Doubles) -> float:
    total = 0.0
    for t in range(len(values)):
        total += values[t]
    return total


SIGNS = ("positive.tokens", "positive.kept", "negative.tokens", "negative.kept")


@_compiled
def _by_sign(mask: Bytes, rejected: Bytes, advantages: Floats) -> tuple[float, ...]:
    """Response tokens, and those of them that no rule for tokens rejects, by the sign of their advantage."""
    positive = positive_kept = negative = negative_kept = 0.0
    for t in range(len(mask)):
        kept = 1.0 if rejected[t] == 0 else 0.0
        above = 1.0 if (mask[t] != 0) & (advantages[t] > 0.0) else 0.0
        below = 1.0 if (mask[t] != 0) & (advantages[t] < 0.0) else 0.0
        positive += above
        positive_kept += above * kept
        negative += below
        negative_kept += below * kept
    return positive, positive_kept, negative, negative_kept


@_compiled
def _count_kept(mask: Bytes, rejected: Bytes) -> float:
    kept = 0.0
    for t in range(len(mask)):
        kept += 1.0 if (mask[t] != 0) & (rejected[t] == 0) else 0.0
    return kept


@_compiled
def _count_alone(values: Doubles, ones: Floats, rejected: Bytes, bounds: tuple[float, float, float]) -> float:
    """Tokens that a rule rejects and no other one does."""
    alone = 0.0
    for t in range(len(values)):
        beyond = (values[t] > bounds[1]) | (values[t] < bounds[0])
        alone += np.float64(ones[t]) if beyond & (rejected[t] == 1) else 0.0
    return alone


AGE = ("age", "age.max")


@_compiled
def _ages(versions: NDArray[np.int64], current: int, ones: Floats, buckets: Bytes) -> tuple[float, float]:
    """Ages of the tokens in updates, the last of ``NUM_AGES`` buckets holding all older ones, to ``buckets``."""
    total, oldest = 0.0, np.int64(-1 << 62)
    for t in range(len(versions)):
        age = current - versions[t]
        buckets[t] = min(max(age, 0), NUM_AGES - 1)
        total += np.float64(age) * np.float64(ones[t])
        oldest = max(oldest, age if ones[t] > 0.0 else oldest)
    return total, np.float64(oldest) if oldest > np.int64(-1 << 62) else -np.inf


@_compiled
def _turns(mask: Bytes, buckets: Bytes) -> None:
    """Turns of the tokens, the last of ``NUM_TURNS`` buckets holding all later ones, to ``buckets``."""
    begins = 1 if len(mask) > 0 and mask[0] != 0 else 0
    for t in range(1, len(mask)):
        begins += 1 if (mask[t] != 0) & (mask[t - 1] == 0) else 0
    buckets[:] = 0
    if begins > 1:  # rare, and slow: every token waits for the one before
        turn, inside = -1, False
        for t in range(len(mask)):
            turn += 1 if (mask[t] != 0) & (not inside) else 0
            inside = mask[t] != 0
            buckets[t] = min(max(turn, 0), NUM_TURNS - 1)


@_compiled
def _split(row: Row, buckets: Bytes, k3: Doubles, column: Doubles, parts: Doubles) -> None:
    """Tokens, log-ratios and k3 of a row by bucket to ``parts`` ``[3 * buckets]``, which are 0."""
    count, strangers = len(parts) // 3, 0
    for t in range(len(buckets)):
        strangers += 1 if buckets[t] != buckets[0] else 0
    if strangers == 0 and len(buckets) > 0:
        bucket = buckets[0]
        parts[bucket], parts[count + bucket], parts[2 * count + bucket] = column[_TOKENS], column[_LOG_RATIO], _total(k3)
        return
    for t in range(len(buckets)):
        parts[buckets[t]] += np.float64(row.ones[t])
        parts[count + buckets[t]] += np.float64(row.logs[t])
        parts[2 * count + buckets[t]] += k3[t]


_FIRST_BIN = int(np.float32(SMALLEST).view(np.int32)) >> 19
"""The first 13 bits (sign, exponent and 4 of the mantissa) of the smallest log-ratio that is told apart from 0."""


@_compiled
def _count_bins(bits: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
    """Add log-ratios, given by the bits of their float32, to ``log_ratio_histogram``, which rounds to float16 first."""
    for t in range(len(bits)):
        magnitude = bits[t] & 0x7FFFFFFF
        rounded = (magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 19
        distance = min(max(rounded - _FIRST_BIN + 1, 0), BINS_PER_SIDE)
        counts[BINS_PER_SIDE + (distance if bits[t] >= 0 else -distance)] += 1


ROW_RULES = ("k2.sum", "k2.max", "k3.sum", "k3.max")
NAMES = (
    *GAP, "log_ratio.max", "negated_log_ratio.max", *EXPONENTIALS, *WEIGHTS, "weight.max", "weight.negated.max", *ROW_RULES,
    "token_kept", *SIGNS, *AGE,
)  # fmt: skip
"""Lines of the columns. Behind them: ages and turns (``_split``), then of each rule for tokens ``RULE``, ``EXTREMES``, alone."""
_TOKENS, _LOG_RATIO = GAP.index("tokens"), GAP.index("log_ratio")
_AT_EXTREMES = len(GAP)
_AT_EXPONENTIALS = _AT_EXTREMES + len(EXTREMES)
_AT_WEIGHTS = _AT_EXPONENTIALS + len(EXPONENTIALS)
_AT_ROW_RULES = _AT_WEIGHTS + len(WEIGHTS) + len(EXTREMES)
_AT_KEPT = _AT_ROW_RULES + len(ROW_RULES)
_AT_AGE = _AT_KEPT + 1 + len(SIGNS)
AT_AGES = len(NAMES)
AT_TURNS = AT_AGES + 3 * NUM_AGES
AT_RULES = AT_TURNS + 3 * NUM_TURNS
RULE_LINES = len(RULE) + len(EXTREMES) + 1


@_compiled
def _put(column: Doubles, line: int, values: tuple[float, ...]) -> None:
    for n in range(len(values)):
        column[line + n] = values[n]


@_compiled
def _put_extremes(column: Doubles, line: int, values: Floats, bits: Integers, ones: Floats) -> None:
    """``EXTREMES`` of a row; -inf if it has no valid token."""
    _put(column, line, _extremes(values, bits, ones) if column[_TOKENS] > 0.0 else (-np.inf, -np.inf))


@_compiled
def _look(row: Row, plan: Plan, column: Doubles) -> Doubles:
    """Columns of the gap and the weights; returns the weights of the tokens."""
    weights = np.empty(len(row.mask))
    _put_extremes(column, _AT_EXTREMES, row.logs, row.logs.view(plan.bits.dtype), row.ones)
    _put(column, _AT_EXPONENTIALS, _exponentiate(row.logs, row.bounded, row.excess, plan.log_veto))
    if plan.weighs == TOKENS:
        _put(column, _AT_WEIGHTS, _weigh(row.logs, row.ones, row.excess, weights, plan))
        if plan.is_band:
            _put_extremes(column, _AT_WEIGHTS + len(WEIGHTS), weights, weights.view(np.int64), row.ones)
    elif plan.weighs != NOTHING:
        weights[:] = row.ones
        weights *= _row_weight(column, plan)
    return weights


@_compiled
def _judge_all(row: Row, plan: Plan, rules: Rules, column: Doubles) -> None:
    """Columns of the rules; fills ``row.rejected``."""
    values = np.empty(len(row.mask))
    for kind, line, wanted in ((K2, _AT_ROW_RULES, plan.sums_k2), (K3, _AT_ROW_RULES + 2, plan.sums_k3)):
        if wanted:
            _divergence(kind, row.bounded, row.excess, values)
            column[line] = _total(values)
            if column[_TOKENS] > 0.0:
                column[line + 1] = max(_extremes(values, values.view(np.int64), row.ones)[0], 0.0)
    for n in range(len(rules.kinds)):
        line = AT_RULES + n * RULE_LINES
        _divergence(rules.kinds[n], row.bounded, row.excess, values)
        _put(column, line, _judge(values, row.ones, row.rejected, (rules.lower[n], rules.upper[n], rules.zero[n])))
        _put_extremes(column, line + len(RULE), values, values.view(np.int64), row.ones)
    column[_AT_KEPT] = _count_kept(row.mask, row.rejected)


@_compiled
def _split_all(batch: Batch, n: int, row: Row, plan: Plan, rules: Rules, column: Doubles) -> None:
    """Columns of row ``n`` by sign of the advantage, by age, by turn and by single rule."""
    values, buckets = np.empty(len(row.mask)), np.empty(len(row.mask), np.uint8)
    if len(batch.advantages) > 0:
        _put(column, _AT_KEPT + 1, _by_sign(row.mask, row.rejected, batch.advantages[n, : len(row.mask)]))
    for rule in range(len(rules.kinds)):
        _divergence(rules.kinds[rule], row.bounded, row.excess, values)
        alone = _count_alone(values, row.ones, row.rejected, (rules.lower[rule], rules.upper[rule], rules.zero[rule]))
        column[AT_RULES + (rule + 1) * RULE_LINES - 1] = alone
    _divergence(K3, row.bounded, row.excess, values)
    column[_AT_AGE + 1] = -np.inf
    if len(batch.versions) > 0:
        _put(column, _AT_AGE, _ages(batch.versions[n, : len(row.mask)], plan.current_version, row.ones, buckets))
        _split(row, buckets, values, column, column[AT_AGES:AT_TURNS])
    _turns(row.mask, buckets)
    _split(row, buckets, values, column, column[AT_TURNS:AT_RULES])


@_compiled_for_python
def sweep_rows(
    batch: Batch, plan: Plan, rules: Rules, columns: Doubles, counts: NDArray[np.int64], span: tuple[int, int]
) -> None:
    """Columns ``[lines, B]``, 0 before, of the rows in ``span`` (first and behind the last); their weights and keep mask.

    ``counts`` ``[NUM_BINS]`` gains the log-ratios if ``plan.full``, those of tokens that are not valid as 0.
    """
    for n in range(span[0], span[1]):
        mask, end, column = batch.mask[n], len(batch.mask[n]), columns[:, n]
        while end > 0 and mask[end - 1] == 0:
            end -= 1
        train, rollout = batch.train[n, :end], batch.rollout[n, :end]
        logs, ones, bounded = np.empty_like(train), np.empty_like(train), np.empty_like(train)
        row = Row(mask[:end], logs, ones, bounded, np.empty(end), np.zeros(end, np.uint8))
        _put(column, 0, _clean(train, rollout, row.mask, logs, ones))
        weights = _look(row, plan, column)
        _judge_all(row, plan, rules, column)
        if len(batch.weights) > 0:
            batch.weights[n, :end] = weights
            batch.weights[n, end:] = 0.0
        if len(batch.keep) > 0:
            batch.keep[n, :end] = row.rejected == 0
            batch.keep[n, end:] = 1
        if plan.full:
            _split_all(batch, n, row, plan, rules, column)
            _count_bins(logs.astype(np.float32).view(np.int32), counts)
