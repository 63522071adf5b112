"""Signatures: what each cause of a gap leaves in the log-probs, as sums over tokens that merge like all
statistics.

Of a sampled token: ``l = log pi - log mu`` (train, rollout as reported), ``rho = exp(l)``, ``p = pi``. Of the
distribution of the trainer that it belongs to: the entropy ``H``, and ``Q``, the sum of its squared
probabilities. Under pi, ``u = log p + H`` has mean 0 and variance ``V``, the varentropy. ``g = 1 - 2p + Q``
is the squared norm of the gradient of log p for the logits: independent noise of variance ``s^2`` on every
logit gives l the variance ``s^2 g``.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.correction.histogram import NUM_BINS, bin_value
from verl_rc.correction.log_ratio import LogRatio, sequence_sum
from verl_rc.correction.sequences import LogProbs, SequenceContext
from verl_rc.correction.totals import Signatures
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.mergeable import Mean, Moments, Quotient

STRIDES = (1, 8, 64)
"""By bucket of positions, the distance of those that are looked at: 46 of the first 256, 106 of 4,096."""
SMALLEST_GRADIENTS = 1e-5
"""Below this, a sum of g is rounding error: g is 0 for certain tokens."""
_LARGEST_FIRST = sorted(range(NUM_BINS), key=lambda index: abs(bin_value(index)), reverse=True)
_LAST_BITS = (1 << BOUNDS.rounded_bits) - 1


def signature_sums(
    log_probs: LogProbs, facts: SequenceContext, ratios: Moments[Tensor]
) -> Signatures[Tensor]:
    """The sums over the tokens of sequences ``[B]``; ``ratios`` are those of each, of ``rho - 1`` over all of
    its tokens.

    Lags and rounding leave their traces everywhere if anywhere: the first tokens are enough. All others are
    estimated from every token of the first bucket of positions and every ``STRIDES``-th of the others, which
    counts as so many. Which tokens those are depends on their positions alone: nothing changes with batches,
    ranks, order or padding.
    """
    ratio = LogRatio.from_log_probs(
        LogProbs(*map(_sampled, (log_probs.train, log_probs.rollout, log_probs.response_mask)))
    )
    logs, positions = ratio.precise, {"squares": _by_position(ratio.precise.square())}
    temperature = surprisal = None
    engines, (lags, rounded) = tuple[Quotient[Tensor], ...](), _head_sums(log_probs)
    if facts.entropies is not None:
        centred = torch.addcmul(ratio.train, _finite(_sampled(facts.entropies), ratio), ratio.valid).double()
        positions["deviations"] = _by_position(centred.square())
        temperature = Quotient.from_sequences(_total(logs * centred), _added(positions["deviations"]))
        surprisal = Mean(-_total(centred), _total(ratio.valid))
    if facts.sum_pi_squared is not None:
        less_one = torch.add(_finite(_sampled(facts.sum_pi_squared), ratio), ratio.train.exp(), alpha=-2.0)
        positions["gradients"] = _by_position(torch.addcmul(ratio.valid, less_one, ratio.valid))
        if facts.engines is not None:
            engines = tuple(
                _by_engine(facts.engines, _added(positions["squares"]), _added(positions["gradients"]))
            )
    if facts.varentropies is not None:
        positions["varentropies"] = _by_position(_finite(_sampled(facts.varentropies), ratio) * ratio.valid)
    return Signatures(
        missing=Quotient.from_sequences(-ratios.total, ratios.count),
        positions=positions,
        temperature=temperature,
        surprisal=surprisal,
        engines=engines,
        lags=lags,
        rounded=rounded,
    )


def _by_engine(engines: Tensor, squares: Tensor, gradients: Tensor) -> Iterator[Quotient[Tensor]]:
    """Yield the sums of each engine, from those of sequences ``[B]``."""
    for number in range(BOUNDS.engines):
        here = (engines.clamp_max(BOUNDS.engines - 1) == number).double()
        yield Quotient.from_sequences(squares * here, gradients * here)


def _finite(values: Tensor, ratio: LogRatio) -> Tensor:
    return torch.nan_to_num(values.detach().to(ratio.values.dtype), 0.0, 0.0, 0.0)


def _sampled(values: Tensor) -> Tensor:
    """``[B, k]``: of ``[B, T]`` the positions that are looked at, each in the middle of those that it stands
    for."""
    edges = BOUNDS.position_edges
    parts = zip((0, *edges), (*edges, None), STRIDES, strict=True)
    return torch.cat([values[:, low + stride // 2 : high : stride] for low, high, stride in parts], dim=1)


def _by_position(sample: Tensor) -> tuple[Tensor, ...]:
    """Sums of what ``_sampled`` took, by bucket of positions, each token as often as it counts; float64
    ``[B]``."""
    bounded = zip(pairwise((0, *BOUNDS.position_edges)), STRIDES, strict=False)
    ends = accumulate(len(range(low + stride // 2, high, stride)) for (low, high), stride in bounded)
    parts = zip(pairwise((0, *ends, None)), STRIDES, strict=True)
    return tuple(sequence_sum(sample[:, slice(*edges)]) * stride for edges, stride in parts)


def _total(sample: Tensor) -> Tensor:
    return _added(_by_position(sample))


def _added(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(parts).sum(dim=0)


def _head_sums(log_probs: LogProbs) -> tuple[tuple[Mean[Tensor], ...], Mean[Tensor]]:
    """What the first positions of all sequences ``[B]`` say of shifted and of rounded log-probs."""
    whole = (log_probs.train, log_probs.rollout, log_probs.response_mask)
    head = LogProbs(*(values[:, : BOUNDS.head] for values in whole))
    ratio = LogRatio.from_log_probs(head)
    farthest = max(BOUNDS.lags)
    # [B, t, k]: for every position those around it, with zeros beyond both ends that count as no tokens. One
    # zero more, whose window is dropped, leaves room for a window where t is 0.
    rollout, neighbours = (
        pad(values, (farthest, farthest + 1)).unfold(-1, len(BOUNDS.lags), 1)[:, :-1]
        for values in (ratio.train - ratio.values, ratio.valid)
    )
    pairs = neighbours * ratio.valid[..., None]
    distances = (ratio.train[..., None] - rollout).abs_().mul_(pairs)
    totals = (values.sum(dim=1, dtype=torch.float64).unbind(dim=-1) for values in (distances, pairs))
    single = head.rollout.detach().float().contiguous()
    nonzero = ratio.valid * (single != 0)
    rounded = nonzero * (single.view(torch.int32) & _LAST_BITS == 0)
    return tuple(map(Mean, *totals)), Mean(sequence_sum(rounded), sequence_sum(nonzero))


def signature_metrics(sums: Signatures[float], log_ratios: Sequence[float]) -> dict[str, float]:
    """Metrics from merged sums and the histogram of the tokens' log-ratios; left out where nothing was
    measured."""
    metrics = {"missing_mass": sums.missing.value, "rounded_fraction": sums.rounded.value}
    metrics |= {"lag": float(_lag(sums.lags)), "concentration": concentration(log_ratios)}
    for name, quotient in (("missing_mass_z", sums.missing), ("temperature_z", sums.temperature)):
        if quotient is not None and (z := quotient.z) is not None:
            metrics[name] = z
    positions = sums.positions
    square = math.fsum(positions["squares"])
    if sums.temperature is not None and sums.surprisal is not None:
        products, squares = sums.temperature.a, sums.temperature.b
        metrics |= {
            "temperature_slope": sums.temperature.value,
            "temperature_r2": products**2 / (squares * square) if squares * square else 0.0,
            "surprisal_excess": sums.surprisal.value,
        }
        if "varentropies" in positions:
            metrics["surprisal_excess_bound"] = _surprisal_bound(
                positions["varentropies"], positions["deviations"], sums.surprisal.count, log_ratios
            )
    if "gradients" in positions:
        parts = enumerate(zip(positions["squares"], positions["gradients"], strict=True))
        noise = {"logit_noise": (square, math.fsum(positions["gradients"]))} | {
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
        others = [astuple(noise) for number, noise in noises.items() if number != odd]
        noisiest = noises[odd]
        rest = Quotient(*map(math.fsum, zip(*others, strict=True)))
        factor = BOUNDS.engine_noise**2
        error = math.hypot(noisiest.error, factor * rest.error)
        metrics |= {
            "noisiest_engine": float(odd),
            "noisiest_engine_ratio": math.sqrt(noisiest.value / rest.value) if rest.value else 0.0,
            "noisiest_engine_z": (noisiest.value - factor * rest.value) / error if error else 0.0,
        }
    return metrics


def _surprisal_bound(
    varentropies: Sequence[float], deviations: Sequence[float], tokens: float, log_ratios: Sequence[float]
) -> float:
    """How far the mean of u can be from 0 for tokens drawn from the reported mu: what mu makes, and what
    chance does.

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
