"""Signatures: what each cause of a gap leaves in the log-probs, from sums over tokens that merge like all
statistics. Pure floats: ``verl_rc.correction`` adds up tensors in a step, ``verl_rc.insight`` token records.

Of a sampled token: ``l = log pi - log mu`` (train, rollout as reported), ``rho = exp(l)``, ``p = pi``. Of the
distribution of the trainer that it belongs to: the entropy ``H``, and ``Q``, the sum of its squared
probabilities. Under pi, ``u = log p + H`` has mean 0 and variance ``V``, the varentropy. ``g = 1 - 2p + Q``
is the squared norm of the gradient of log p for the logits: independent noise of variance ``s^2`` on every
logit gives l the variance ``s^2 g``.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.log_ratio_bins import NUM_BINS, bin_value
from verl_rc.metrics.mergeable import Mean, Quotient

T = TypeVar("T")

STRIDES = (1, 8, 64)
"""The distance between the positions that are looked at, by bucket of positions: 46 of the first 256, 106 of
4,096."""
SMALLEST_GRADIENTS = 1e-5
"""Below this, a sum of g is rounding error: g is 0 for certain tokens."""
_LARGEST_FIRST = sorted(range(NUM_BINS), key=lambda index: abs(bin_value(index)), reverse=True)


@dataclass(frozen=True)
class Signatures(Generic[T]):
    """Sums over all tokens in which the causes of a gap show; see above for the symbols."""

    missing: Quotient[T]
    """``1 - rho``, by tokens."""
    squares: tuple[T, ...]
    """``l^2``, by position in the response."""
    gradients: tuple[T, ...] | None
    """``g``, likewise; None where sums of squared probabilities are unknown."""
    temperature: Quotient[T] | None
    """``l u`` by ``u^2``; None where entropies are unknown."""
    surprisal: Mean[T] | None
    """``-u``, by tokens. None where entropies are unknown."""
    deviations: tuple[T, ...] | None
    """``u^2``, by position in the response. None where entropies are unknown."""
    varentropies: tuple[T, ...] | None
    """``V``, by position in the response; None where it is unknown."""
    engines: tuple[Quotient[T], ...]
    """``l^2`` by ``g``, by engine; the last holds all later ones. Empty: ``g`` or engines are unknown."""
    lags: tuple[Mean[T], ...]
    """``|log pi_t - log mu_(t+k)|`` for every k in ``BOUNDS.lags``, in the first tokens of every sequence."""
    rounded: Mean[T]
    """Rollout log-probs that fit into 16 bits, of those that are not 0; in the same tokens."""


def signature_metrics(sums: Signatures[float], log_ratios: Sequence[float]) -> dict[str, float]:
    """Metrics from merged sums and the histogram of the tokens' log-ratios; left out where nothing was
    measured."""
    metrics = {"missing_mass": sums.missing.value, "rounded_fraction": sums.rounded.value}
    metrics |= {"lag": float(_lag(sums.lags)), "concentration": concentration(log_ratios)}
    for name, quotient in (("missing_mass_z", sums.missing), ("temperature_z", sums.temperature)):
        if quotient is not None and (z := quotient.z) is not None:
            metrics[name] = z
    square = math.fsum(sums.squares)
    if sums.temperature is not None and sums.surprisal is not None:
        products, squares = sums.temperature.a, sums.temperature.b
        metrics |= {
            "temperature_slope": sums.temperature.value,
            "temperature_r2": products**2 / (squares * square) if squares * square else 0.0,
            "surprisal_excess": sums.surprisal.value,
        }
        if sums.varentropies is not None and sums.deviations is not None:
            metrics["surprisal_excess_bound"] = _surprisal_bound(
                sums.varentropies, sums.deviations, sums.surprisal.count, log_ratios
            )
    if sums.gradients is not None:
        parts = enumerate(zip(sums.squares, sums.gradients, strict=True))
        noise = {"logit_noise": (square, math.fsum(sums.gradients))} | {
            f"position_{n}_logit_noise": part for n, part in parts
        }
        metrics |= {name: math.sqrt(a / b) for name, (a, b) in noise.items() if b > SMALLEST_GRADIENTS}
    return metrics | _engine_metrics(sums.engines)


def _engine_metrics(engines: Sequence[Quotient[float]]) -> dict[str, float]:
    """Noise of each engine, and how certain it is that one has more than ``BOUNDS.engine_noise`` times that
    of the others."""
    noises = {number: noise for number, noise in enumerate(engines) if noise.b > SMALLEST_GRADIENTS}
    metrics = {f"engine_{number}_logit_noise": math.sqrt(noise.value) for number, noise in noises.items()}
    if len(noises) > 1:
        odd = max(noises, key=lambda number: noises[number].value)
        noisiest = noises.pop(odd)
        others = Quotient(*map(math.fsum, zip(*map(astuple, noises.values()), strict=True)))
        factor = BOUNDS.engine_noise**2
        error = math.hypot(noisiest.error, factor * others.error)
        metrics |= {
            "noisiest_engine": float(odd),
            "noisiest_engine_ratio": math.sqrt(noisiest.value / others.value) if others.value else 0.0,
            "noisiest_engine_z": (noisiest.value - factor * others.value) / error if error else 0.0,
        }
    return metrics


def _surprisal_bound(
    varentropies: Sequence[float], deviations: Sequence[float], tokens: float, log_ratios: Sequence[float]
) -> float:
    """The largest distance of the mean of u from 0 for tokens drawn from the reported mu: by mu itself, and
    by chance.

    ``varentropies`` and ``deviations``: sums of V and of u^2, by position; chance is judged by the larger
    one. Where the trainer is certain of most tokens, a step may draw none of the unlikely ones, and u^2 is
    next to nothing. Or it draws one, and V is little: very rare tokens add little to it.
    """
    if not tokens:
        return 0.0
    # Cauchy-Schwarz on E_mu[u] = E_pi[(1 / rho - 1) u].
    distance = math.sqrt(max(_mean_reciprocal(log_ratios) - 1.0, 0.0))
    # Given the tokens before it, u of a token has mean 0: variances add up. A token that counts as n has n^2
    # times its own.
    variance = max(math.fsum(map(operator.mul, STRIDES, parts)) for parts in (varentropies, deviations))
    return distance * math.sqrt(math.fsum(varentropies) / tokens) + BOUNDS.z * math.sqrt(variance) / tokens


def _mean_reciprocal(log_ratios: Sequence[float]) -> float:
    """Mean over tokens of 1 / rho, from the histogram of their log-ratios; 1 without any."""
    reciprocals = (count * math.exp(-bin_value(index)) for index, count in enumerate(log_ratios) if count)
    return math.fsum(reciprocals) / math.fsum(log_ratios) if any(log_ratios) else 1.0


def _lag(lags: Sequence[Mean[float]]) -> int:
    """The shift that halves the mean distance; 0 if none does, or the distance is small."""
    distances = {lag: mean.value for lag, mean in zip(BOUNDS.lags, lags, strict=True) if mean.count}
    best = min(distances, key=lambda lag: distances[lag], default=0)
    return best if distances and BOUNDS.lag_distance < distances[0] > 2 * distances[best] else 0


def concentration(log_ratios: Sequence[float]) -> float:
    """Share of the sum of squares that the largest 1 % of the log-ratios in a histogram have; 0 when all are
    0."""
    largest = [(bin_value(index) ** 2, log_ratios[index]) for index in _LARGEST_FIRST if log_ratios[index]]
    remaining, share = BOUNDS.largest_share * math.fsum(log_ratios), 0.0
    for square, count in largest:
        number = min(count, remaining)
        share += square * number
        remaining -= number
    total = math.fsum(square * count for square, count in largest)
    return share / total if total else 0.0
