"""The sums over tokens that signatures are computed from; symbols and formulas stand in
``verl_rc.metrics.signatures``."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.correction.log_ratio import LogRatio, sequence_sum
from verl_rc.correction.sequences import LogProbs, SequenceContext
from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.mergeable import Mean, Moments, Quotient
from verl_rc.metrics.signatures import STRIDES, Signatures

_LAST_BITS = (1 << BOUNDS.rounded_bits) - 1


def signature_sums(
    log_probs: LogProbs, context: SequenceContext, ratios: Moments[Tensor]
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
    logs, squares = ratio.precise, _by_position(ratio.precise.square())
    temperature = surprisal = deviations = gradients = varentropies = None
    engines, (lags, rounded) = tuple[Quotient[Tensor], ...](), _head_sums(log_probs)
    if context.entropies is not None:
        centred = torch.addcmul(
            ratio.train, _finite(_sampled(context.entropies), ratio), ratio.valid
        ).double()
        deviations = _by_position(centred.square())
        temperature = Quotient.from_sequences(_total(logs * centred), torch.stack(deviations).sum(dim=0))
        surprisal = Mean(-_total(centred), _total(ratio.valid))
    if context.sum_pi_squared is not None:
        less_one = torch.add(_finite(_sampled(context.sum_pi_squared), ratio), ratio.train.exp(), alpha=-2.0)
        gradients = _by_position(torch.addcmul(ratio.valid, less_one, ratio.valid))
        if context.engines is not None:
            numbers = context.engines.clamp_max(BOUNDS.engines - 1)
            totals = torch.stack(squares).sum(dim=0), torch.stack(gradients).sum(dim=0)
            engines = tuple(
                Quotient.from_sequences(*(total * (numbers == number) for total in totals))
                for number in range(BOUNDS.engines)
            )
    if context.varentropies is not None:
        varentropies = _by_position(_finite(_sampled(context.varentropies), ratio) * ratio.valid)
    return Signatures(
        missing=Quotient.from_sequences(-ratios.total, ratios.count),
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
    return torch.stack(_by_position(sample)).sum(dim=0)


def _head_sums(log_probs: LogProbs) -> tuple[tuple[Mean[Tensor], ...], Mean[Tensor]]:
    """What the first positions of all sequences ``[B]`` say of shifted and of rounded log-probs."""
    columns = (log_probs.train, log_probs.rollout, log_probs.response_mask)
    head = LogProbs(*(column[:, : BOUNDS.head] for column in columns))
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
