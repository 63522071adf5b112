"""The sums that signatures are computed from, of token records: in numpy what
``verl_rc.correction.signatures`` adds up in tensors. Symbols stand in ``verl_rc.metrics.signatures``."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_rc.metrics.bounds import BOUNDS, LOG_RATIO_BOUND
from verl_rc.metrics.log_ratio_bins import (
    BINS_PER_OCTAVE,
    BINS_PER_SIDE,
    FIRST_EXPONENT,
    LARGEST,
    NUM_BINS,
    SMALLEST,
)
from verl_rc.metrics.mergeable import Mean, Quotient
from verl_rc.metrics.signatures import SMALLEST_GRADIENTS, STRIDES, Signatures
from verl_rc.records.token_records.token_record import Array, TokenRecord

_LAST_BITS = (1 << BOUNDS.rounded_bits) - 1


@dataclass(frozen=True)
class ComparedTokens:
    """The tokens of a record that have log-probs of both sides, in rows that were drawn at random."""

    record: TokenRecord
    log_ratios: Array
    """float64 ``[tokens]``: log-prob of the trainer less that of the engine, nats; 0 where not compared."""
    is_compared: Array
    """bool ``[tokens]``."""

    @classmethod
    def from_record(cls, record: TokenRecord) -> "ComparedTokens | None":
        """The compared tokens of a record. None where the trainer's log-probs are not known, or no token is
        compared."""
        log_ratios = record.log_ratio()
        if log_ratios is None:
            return None
        is_random = record.rows["chosen_by"] == "random"
        is_compared = record.tokens["response_mask"] & is_random[record.row_numbers] & np.isfinite(log_ratios)
        return cls(record, np.where(is_compared, log_ratios, 0.0), is_compared) if is_compared.any() else None

    @cached_property
    def row_numbers(self) -> Array:
        """int64 ``[tokens]``: the row of every token."""
        return self.record.row_numbers

    @cached_property
    def positions(self) -> Array:
        """int64 ``[tokens]``: the place of every token in its row."""
        return np.arange(len(self.row_numbers)) - self.record.starts[self.row_numbers]

    @cached_property
    def old_log_probs(self) -> Array:
        """float64 ``[tokens]``: the trainer's log-prob, 0 where none is compared."""
        return self.finite("old_log_prob")

    @property
    def other_mass(self) -> Array:
        """float64 ``[tokens]``: 1 - p, the trainer's probability of all other tokens."""
        mass: Array = -np.expm1(np.minimum(self.old_log_probs, 0.0))
        return mass

    @cached_property
    def buckets(self) -> Array:
        """``[tokens]``: number of the bucket of positions."""
        return np.searchsorted(BOUNDS.position_edges, self.positions, side="right")

    @cached_property
    def counts(self) -> Array:
        """float64 ``[tokens]``: how often a token counts; 0 where it is not looked at."""
        strides, lows = np.array(STRIDES)[self.buckets], np.array((0, *BOUNDS.position_edges))[self.buckets]
        is_looked_at = (self.positions - lows) % strides == strides // 2
        return np.where(is_looked_at & self.is_compared, strides, 0).astype("float64")

    def finite(self, name: str) -> Array:
        """float64 ``[tokens]``: a field, 0 where it is not finite or no token is compared."""
        values = self.record.tokens[name].astype("float64")
        return np.where(self.is_compared & np.isfinite(values), values, 0.0)

    def by_row(self, values: Array) -> Array:
        """float64 ``[rows]``: sums of ``[tokens]``."""
        return np.bincount(self.row_numbers, values, len(self.record.lengths))

    def by_bucket(self, values: Array) -> tuple[float, ...]:
        """Sums of ``[tokens]`` by bucket of positions, each token as often as it counts."""
        return tuple(np.bincount(self.buckets, values * self.counts, len(STRIDES)).tolist())


def signature_sums(tokens: ComparedTokens) -> Signatures[float]:
    """The sums over all compared tokens of a record; None or empty where a field is not known."""
    fields, counts, old_log_probs = tokens.record.tokens, tokens.counts, tokens.old_log_probs
    log_ratios = np.clip(tokens.log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    temperature = surprisal = deviations = varentropies = gradients = None
    if "entropy" in fields:
        centred = old_log_probs + tokens.finite("entropy")
        deviations = tokens.by_bucket(centred**2)
        temperature = summed(tokens.by_row(counts * log_ratios * centred), tokens.by_row(counts * centred**2))
        surprisal = Mean(-float(counts @ centred), float(counts.sum()))
    if "varentropy" in fields:
        varentropies = tokens.by_bucket(tokens.finite("varentropy"))
    per_token = _least_gradients(tokens)
    if "sum_pi_squared" in fields:
        per_token = 1.0 - 2.0 * np.exp(old_log_probs) + tokens.finite("sum_pi_squared")
        gradients = tokens.by_bucket(per_token)
    return Signatures(
        missing=summed(-tokens.by_row(np.expm1(log_ratios)), tokens.by_row(tokens.is_compared)),
        squares=tokens.by_bucket(log_ratios**2),
        gradients=gradients,
        temperature=temperature,
        surprisal=surprisal,
        deviations=deviations,
        varentropies=varentropies,
        engines=tuple(_by_engine(tokens, log_ratios**2, per_token)),
        lags=_lags(tokens),
        rounded=_rounded(tokens),
    )


def summed(a: Array, b: Array) -> Quotient[float]:
    """The quotient of what each row adds."""
    columns = Quotient.from_sequences(a, b)
    return Quotient(
        *(float(np.sum(column)) for column in (columns.a, columns.b, columns.aa, columns.ab, columns.bb))
    )


def _by_engine(tokens: ComparedTokens, squares: Array, gradients: Array) -> Iterator[Quotient[float]]:
    if "engine" not in tokens.record.rows:
        return
    engines = np.minimum(tokens.record.rows["engine"], BOUNDS.engines - 1)
    above, below = (tokens.by_row(values * tokens.counts) for values in (squares, gradients))
    for number in range(BOUNDS.engines):
        yield summed(above * (engines == number), below * (engines == number))


def _least_gradients(tokens: ComparedTokens) -> Array:
    """float64 ``[tokens]``: what g is not below where Q is not known.

    ``g = (1 - p)^2 (1 + S)``, S the sum of the squared probabilities of the other tokens, each over 1 - p.
    Their entropy is ``h = (H - h_2(p)) / (1 - p)``, and ``exp(-h) <= S <= 1``.
    """
    other_mass = tokens.other_mass
    least: Array = np.square(other_mass)
    if "entropy" in tokens.record.tokens:
        binary = -np.exp(tokens.old_log_probs) * tokens.old_log_probs - other_mass * np.log(
            np.maximum(other_mass, 1e-300)
        )
        entropy = np.maximum(tokens.finite("entropy") - binary, 0.0) / np.maximum(other_mass, 1e-300)
        least = least * (1.0 + np.exp(-entropy))
    return least


def noise_interval(tokens: ComparedTokens) -> dict[str, float]:
    """The least and the most that logit noise can be where sums of squared probabilities are not known; empty
    where they are, or all tokens are certain."""
    bounds = (_least_gradients(tokens), 2.0 * tokens.other_mass**2)
    least, most = (float(tokens.counts @ gradients) for gradients in bounds)
    if "sum_pi_squared" in tokens.record.tokens or least <= SMALLEST_GRADIENTS:
        return {}
    square = float(tokens.counts @ np.clip(tokens.log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND) ** 2)
    return {"logit_noise_least": math.sqrt(square / most), "logit_noise_most": math.sqrt(square / least)}


def _lags(tokens: ComparedTokens) -> tuple[Mean[float], ...]:
    """The ``lags`` of ``Signatures``."""
    head = np.flatnonzero(tokens.is_compared & (tokens.positions < BOUNDS.head))
    rollout, last = tokens.old_log_probs - tokens.log_ratios, len(tokens.row_numbers) - 1
    means = []
    for lag in BOUNDS.lags:
        neighbour = np.clip(head + lag, 0, last)
        is_pair = (
            (tokens.positions[neighbour] == tokens.positions[head] + lag)
            & (tokens.row_numbers[neighbour] == tokens.row_numbers[head])
            & tokens.is_compared[neighbour]
            & (tokens.positions[neighbour] < BOUNDS.head)
        )
        distances = np.abs(tokens.old_log_probs[head] - rollout[neighbour])[is_pair]
        means.append(Mean(float(distances.sum()), float(is_pair.sum())))
    return tuple(means)


def _rounded(tokens: ComparedTokens) -> Mean[float]:
    """The ``rounded`` of ``Signatures``."""
    head = tokens.record.tokens["rollout_log_prob"][tokens.is_compared & (tokens.positions < BOUNDS.head)]
    head = head.astype("float32")
    nonzero = head != 0
    fits = nonzero & (head.view("int32") & _LAST_BITS == 0)
    return Mean(float(fits.sum()), float(nonzero.sum()))


def log_ratio_counts(tokens: ComparedTokens) -> list[float]:
    """The histogram of the compared tokens' log-ratios, in the bins of ``verl_rc.metrics.log_ratio_bins``."""
    values = tokens.log_ratios[tokens.is_compared]
    mantissa, exponent = np.frexp(np.clip(np.abs(values), SMALLEST / 2, LARGEST))
    parts = np.floor(mantissa * (2 * BINS_PER_OCTAVE)) - (BINS_PER_OCTAVE - 1)
    steps = np.clip((exponent - FIRST_EXPONENT) * BINS_PER_OCTAVE + parts, 0, BINS_PER_SIDE)
    bins = (BINS_PER_SIDE + steps * np.sign(values)).astype("int64")
    return list(map(float, np.bincount(bins, minlength=NUM_BINS)))
