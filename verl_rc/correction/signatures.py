"""The sums over tokens that signatures are computed from; symbols and formulas stand in
``verl_rc.metrics.signatures``."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.correction.context import SequenceContext
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.mergeable import Mean, Quotient
from verl_rc.metrics.signatures import STRIDES, Signatures

_LAST_BITS = (1 << BOUNDS.rounded_bits) - 1


def signature_sums(ratio: LogRatio, context: SequenceContext) -> Signatures[Tensor]:
    """The sums over the tokens of sequences ``[b, t]``, what each sequence adds: float64 ``[b]``.

    Lags and rounding leave their traces everywhere if anywhere: the first tokens are enough. All others are
    estimated from every token of the first bucket of positions and every ``STRIDES``-th of the others, which
    counts as so many. Which tokens those are depends on their positions alone: nothing changes with batches,
    ranks, order or padding.
    """
    log_ratio, valid, train = (_sampled(one) for one in (ratio.bounded, ratio.valid, ratio.train.double()))

    def seen(values: Tensor) -> Tensor:
        sampled = _sampled(values.detach()).double()
        return torch.where(valid & sampled.isfinite(), sampled, 0.0)

    squares = _by_position(log_ratio.square())
    temperature = surprisal = deviations = gradients = varentropies = None
    engines = tuple[Quotient[Tensor], ...]()
    if context.entropies is not None:
        centred = torch.where(valid, train + seen(context.entropies), 0.0)
        deviations = _by_position(centred.square())
        temperature = Quotient.from_sequences(_total(log_ratio * centred), _added(deviations))
        surprisal = Mean(-_total(centred), _total(valid))
    if context.sum_pi_squared is not None:
        gradient = 1.0 - 2.0 * train.exp() + seen(context.sum_pi_squared)
        gradients = _by_position(torch.where(valid, gradient, 0.0))
        if context.engines is not None:
            numbers = context.engines.clamp_max(BOUNDS.engines - 1)
            engines = tuple(
                Quotient.from_sequences(*(_added(one) * (numbers == number) for one in (squares, gradients)))
                for number in range(BOUNDS.engines)
            )
    if context.varentropies is not None:
        varentropies = _by_position(seen(context.varentropies))
    missing = Quotient.from_sequences(-ratio.sequence_sums(ratio.excess), ratio.lengths)
    lags, rounded = _head_sums(ratio)
    return Signatures(
        missing=missing,
        squares=squares,
        gradients=gradients,
        temperature=temperature,
        surprisal=surprisal,
        deviations=deviations,
        varentropies=varentropies,
        engines=engines,
        lags=lags,
        rounded=rounded,
    )


def _sampled(values: Tensor) -> Tensor:
    """The chosen positions ``[B, k]`` of ``[B, T]``, each in the middle of those that it stands for."""
    edges = BOUNDS.position_edges
    parts = zip((0, *edges), (*edges, None), STRIDES, strict=True)
    return torch.cat([values[:, low + stride // 2 : high : stride] for low, high, stride in parts], dim=1)


def _by_position(sample: Tensor) -> tuple[Tensor, ...]:
    """Sums of what ``_sampled`` took, by bucket of positions, each token as often as it counts; float64
    ``[B]``."""
    bounded = zip(pairwise((0, *BOUNDS.position_edges)), STRIDES, strict=False)
    ends = accumulate(len(range(low + stride // 2, high, stride)) for (low, high), stride in bounded)
    parts = zip(pairwise((0, *ends, None)), STRIDES, strict=True)
    return tuple(
        sample[:, slice(*edges)].sum(dim=-1, dtype=torch.float64) * stride for edges, stride in parts
    )


def _total(sample: Tensor) -> Tensor:
    return _added(_by_position(sample))


def _added(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(dim=0)


def _head_sums(ratio: LogRatio) -> tuple[tuple[Mean[Tensor], ...], Mean[Tensor]]:
    """Evidence of shifted and of rounded log-probs in the first positions of all sequences ``[b]``."""
    train, rollout, valid = (one[:, : BOUNDS.head] for one in (ratio.train, ratio.rollout, ratio.valid))
    farthest = max(BOUNDS.lags)
    # [b, t, k]: for every position those around it, with padding beyond both ends that counts as no tokens.
    # One more, whose window is dropped, leaves room for a window where t is 0.
    neighbours, is_token = (
        pad(values, (farthest, farthest + 1)).unfold(-1, len(BOUNDS.lags), 1)[:, :-1]
        for values in (rollout, valid)
    )
    pairs = is_token & valid[..., None]
    distances = torch.where(pairs, (train[..., None] - neighbours).abs(), 0.0)
    lags = zip(
        distances.sum(dim=1, dtype=torch.float64).unbind(dim=-1),
        pairs.sum(dim=1, dtype=torch.float64).unbind(dim=-1),
        strict=True,
    )
    single = rollout.float().contiguous()
    nonzero = valid & (single != 0)
    rounded = nonzero & (single.view(torch.int32) & _LAST_BITS == 0)
    counts = (one.sum(dim=-1, dtype=torch.float64) for one in (rounded, nonzero))
    return tuple(Mean(distance, count) for distance, count in lags), Mean(*counts)
