"""Losses that restrain some tokens of the whole mini-batch: those whose advantage and log-prob vary together
most, or those that moved farthest; and one whose clip range depends on it."""

import operator
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.algorithm.losses.clipped import dual_clip, surrogates
from verl_rc.algorithm.losses.inputs import (
    LossMetrics,
    MiniBatchStatistics,
    PolicyLossInputs,
    RatioBounds,
    Selection,
    register_policy_loss,
)
from verl_rc.metrics.mergeable import Mean

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a tensor up over the ranks that share a mini-batch."""
GatherOverRanks = Callable[[Tensor], Tensor]
"""Puts a vector of every rank behind those of the ranks before it."""

# A signed number of 32 bits above 31 bits of hash fits an int64.
_HASH_BITS = 31
_FLOAT_BITS = 31
"""Bits of a float32 that is not negative; their order is that of the numbers."""
_BAPO_LOWS, _BAPO_HIGHS, _BAPO_STEPS, _BAPO_STEP = (0.6, 0.9), (1.2, 3.0), 36, 0.05
"""First and last ends of the clip range of ``bapo``, and the steps from one upper end to the other."""
_NOT_SELECTABLE = torch.iinfo(torch.int64).min


@register_policy_loss("clip_cov")
def clip_cov_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """PPO clipping that also drops tokens of high covariance (Clip-Cov, arXiv:2505.22617); the loss mode
    ``clip_cov``.

    ``w f max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high))``; f is 0 for a share ``clip_cov_ratio`` of the
    mini-batch's tokens (at least one), drawn among those that are not clipped and have ``clip_cov_lb`` < cov
    < ``clip_cov_ub``, with cov = (A − mean A)(lp − mean lp). The draw is a hash of the token's old log-prob,
    advantage and position, so it is reproducible and does not depend on micro-batches; where more tokens of
    one hash are left than may be dropped, each is dropped in part, so that the share is met. Rejected
    tokens enter neither the sum nor the means.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of dropped tokens), those of ``ppo_kl_metrics``.
    """
    unclipped, clipped = surrogates(inputs, inputs.log_ratio.exp())
    dropped = _selected("clip_cov", inputs)
    token_loss = torch.maximum(unclipped, clipped)
    return inputs.reduce(token_loss * (1 - dropped)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(dropped),
        **inputs.ppo_kl_metrics(),
    }


@register_policy_loss("kl_cov")
def kl_cov_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The unclipped surrogate with a penalty on tokens of high covariance (KL-Cov, arXiv:2505.22617);
    ``kl_cov``.

    ``w (−A r + ``ppo_kl_coef`` |lp − lp_old| [selected])``; selected is the share ``kl_cov_ratio`` of the
    mini-batch's tokens (at least one) with the largest cov = (A − mean A)(lp − mean lp). Among equal
    covariances (all of them, when every advantage is the same) the hash of ``clip_cov`` decides; tokens with
    the same hash too share the places left. Rejected tokens enter neither the sum nor the means.

    Returns:
        The loss, 0-d, and ``actor/ppo_kl`` (mean of |old − current|, nats).
    """
    # Not bounded: the penalty must pull back what has gone far.
    distance = inputs.unbounded_log_ratio.abs()
    penalty = inputs.parameters.ppo_kl_coef * distance
    selected = _selected("kl_cov", inputs)
    token_loss = -inputs.advantages * inputs.log_ratio.exp() + penalty * selected
    return inputs.reduce(token_loss), {"actor/ppo_kl": inputs.mean_over_tokens(distance)}


@register_policy_loss("m2po")
def m2po_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The unclipped surrogate without the tokens that moved farthest (M2PO, arXiv:2510.01161); the loss mode
    ``m2po``.

    ``−w A r``, and 0 for the tokens of the mini-batch with the largest (log r)²: the fewest whose absence
    brings the mean of the others down to ``m2_threshold``. Only tokens that would go on in their direction
    (A > 0 and r > 1, or A < 0 and r < 1) are dropped and enter the mean: the others come back. Tokens with
    the same (log r)² are dropped together. Rejected tokens enter neither the sum nor the mean.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of dropped tokens), those of ``ppo_kl_metrics``.
    """
    dropped = _selected("m2po", inputs)
    return inputs.reduce(-inputs.advantages * inputs.log_ratio.exp() * (1 - dropped)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(dropped),
        **inputs.ppo_kl_metrics(),
    }


@register_policy_loss("bapo")
def bapo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The loss ``vanilla`` with a clip range that lets positive advantages weigh enough (BAPO,
    arXiv:2510.18927, as its authors' code computes it); the loss mode ``bapo``.

    The ratio is clipped to low = 0.6 and high = 1.2. Where the sum of A min(r, high) over A >= 0 is below
    ``adv_ratio_target`` times that of −A max(r, low) over A < 0, low is 0.9, and high grows in steps of 0.05
    until the sum is not below, at most to 3. Both sums are over the whole mini-batch; rejected tokens enter
    neither. In the code low moves in steps too, until the sum is not below; but a higher low makes the
    negative sum larger, so it always goes to its end.

    Returns:
        The loss, 0-d, the metrics of ``ppo_clip_loss``, ``actor/ratio_low`` and ``actor/ratio_high``.
    """
    clip_range = inputs.mini_batch_statistics or mini_batch_statistics("bapo", [inputs])
    assert isinstance(clip_range, RatioBounds)
    low, high = (bound.to(inputs.log_probs.dtype) for bound in (clip_range.low, clip_range.high))
    ratio = inputs.log_ratio.exp()
    loss, metrics = dual_clip(inputs, ratio, ratio.clamp(low, high))
    bounds = {"actor/ratio_low": low, "actor/ratio_high": high}
    means = {
        name: inputs.mean_over_tokens(bound.expand_as(inputs.log_probs)) for name, bound in bounds.items()
    }
    return loss, {**metrics, **means}


def mini_batch_statistics(
    name: str,
    micro_batches: Sequence[PolicyLossInputs],
    over_ranks: SumOverRanks | None = None,
    from_ranks: GatherOverRanks | None = None,
) -> MiniBatchStatistics:
    """Statistics of a mini-batch from this rank's share of it (at least one micro-batch) and what the other
    ranks add. None if there are no others.

    Means are taken over all tokens of the mini-batch that are in the loss; then its tokens are ordered, and
    the score of the last one that is selected is found among the best of every rank. So neither micro-batches
    nor ranks change which tokens are selected.
    """
    if name == "m2po":
        return _second_moment_statistics(micro_batches, over_ranks)
    if name == "bapo":
        return _balanced_bounds(micro_batches, over_ranks)
    # In float64, so that the mean of equal advantages is that advantage, however the mini-batch is split: a
    # rounding error in its place would order the tokens by log-prob.
    advantages = reduce(
        operator.add, [inputs.mean_over_tokens(inputs.advantages.double()) for inputs in micro_batches]
    )
    log_probs = reduce(
        operator.add, [inputs.mean_over_tokens(inputs.log_probs.double()) for inputs in micro_batches]
    )
    sums = torch.stack([advantages.total, log_probs.total, advantages.count])
    total, log_prob_total, tokens = sums if over_ranks is None else over_ranks(sums)
    advantage_mean, log_prob_mean = (
        Mean(summed, tokens).value.to(torch.float32) for summed in (total, log_prob_total)
    )
    size = selection_size(name, micro_batches[0], tokens)
    scores = best = torch.cat(
        [selection_scores(name, inputs, advantage_mean, log_prob_mean).flatten() for inputs in micro_batches]
    )
    if from_ranks is not None:  # of one length for all ranks
        count = int(size)  # a read of the device: shapes of collectives are known on the host
        rank_best = scores.topk(min(count, scores.numel())).values
        best = from_ranks(pad(rank_best, (0, count - rank_best.numel()), value=_NOT_SELECTABLE))
    threshold = selection_threshold(best, size)
    counts = torch.stack([(scores > threshold).sum(), (scores == threshold).sum()])
    above, level = (counts if over_ranks is None else over_ranks(counts)).unbind()
    # The places left are divided among the tokens at the threshold.
    share = ((size - above) / level.clamp(min=1)).clamp(max=1).to(torch.float32)
    return Selection(advantage_mean, log_prob_mean, threshold, share)


def _second_moment_statistics(
    micro_batches: Sequence[PolicyLossInputs], over_ranks: SumOverRanks | None
) -> Selection:
    """The largest (log r)², as its bits, up to which the mean of all smaller ones is within the threshold."""
    zero = micro_batches[0].log_probs.new_zeros(())
    scores = torch.cat([selection_scores("m2po", inputs, zero, zero).flatten() for inputs in micro_batches])
    moments = scores.clamp(min=0).to(torch.int32).view(torch.float32).to(torch.float64)
    bound = scores.new_zeros(())
    # The mean of those below a bound grows with it, so the bits of the bound are found one by one.
    for bit in reversed(range(_FLOAT_BITS)):
        higher = bound + (1 << bit)
        below = (scores >= 0) & (scores < higher)
        sums = torch.stack([moments.where(below, 0).sum(), below.sum().to(torch.float64)])
        total, count = sums if over_ranks is None else over_ranks(sums)
        bound = torch.where(total <= micro_batches[0].parameters.m2_threshold * count, higher, bound)
    return Selection(zero, zero, bound - 1, torch.zeros_like(total, dtype=torch.float32))


def _balanced_bounds(
    micro_batches: Sequence[PolicyLossInputs], over_ranks: SumOverRanks | None
) -> RatioBounds:
    """The clip range of ``bapo``."""
    target, lows = micro_batches[0].parameters.adv_ratio_target, _BAPO_LOWS
    highs = [_BAPO_HIGHS[0] + place * _BAPO_STEP for place in range(_BAPO_STEPS)] + [_BAPO_HIGHS[1]]
    parts = []
    for inputs in micro_batches:
        ratio = inputs.log_ratio.detach().double().exp()
        advantages = inputs.advantages.double().where(inputs.loss_mask, 0.0)
        # Positive advantages depend on the upper end alone, the others on the lower one.
        sums = [(advantages.clamp(min=0) * ratio.clamp(max=high)).sum() for high in highs]
        sums += [(advantages.clamp(max=0).neg() * ratio.clamp(min=low)).sum() for low in lows]
        parts.append(torch.stack(sums))
    total = torch.stack(parts).sum(dim=0)
    total = total if over_ranks is None else over_ranks(total)
    positive, (negative_at_first, negative) = total[: len(highs)], total[len(highs) :]
    is_enough = positive[0] >= target * negative_at_first
    places = torch.arange(len(highs), device=total.device)
    reached = places.where(positive >= target * negative, len(highs) - 1).min()
    raised = _BAPO_HIGHS[0] + _BAPO_STEP * reached.double()
    low = torch.full_like(total[0], lows[1]).where(~is_enough, lows[0])
    high = raised.clamp(max=_BAPO_HIGHS[1]).where(~is_enough, _BAPO_HIGHS[0])
    return RatioBounds(low, high)


def selection_scores(
    name: str, inputs: PolicyLossInputs, advantage_mean: Tensor, log_prob_mean: Tensor
) -> Tensor:
    """Order the tokens by how early they are selected.

    Args:
        name: the loss; ``kl_cov`` orders by covariance, ``clip_cov`` by a hash among the tokens in its band,
            ``m2po`` by (log r)².
        inputs: of a micro-batch.
        advantage_mean: 0-d; over the mini-batch.
        log_prob_mean: 0-d, nats; over the mini-batch.

    Returns:
        [B, T], int64; the smallest int64 for tokens that cannot be selected. ``kl_cov`` has the covariance
        (in float32) in the upper bits and the hash in the lower ones, so that one comparison orders by both.
    """
    if name == "m2po":
        log_ratio = inputs.unbounded_log_ratio.detach().to(torch.float32)
        goes_on = inputs.loss_mask & (inputs.advantages * log_ratio > 0)
        return log_ratio.square().view(torch.int32).to(torch.int64).where(goes_on, _NOT_SELECTABLE)
    deviation = (
        inputs.advantages.float() - advantage_mean.float()
    )  # in float32: equal advantages give exactly 0
    covariance = deviation * (inputs.log_probs.detach().float() - log_prob_mean.float())
    scores = _token_hash(inputs)
    candidates = inputs.loss_mask
    if name == "kl_cov":
        scores = scores + (_ordered_bits(covariance) << _HASH_BITS)
    else:
        unclipped, clipped = surrogates(inputs, inputs.log_ratio.exp())
        in_band = (covariance > inputs.parameters.clip_cov_lb) & (covariance < inputs.parameters.clip_cov_ub)
        candidates = candidates & in_band & (clipped <= unclipped)
    return scores.where(candidates, _NOT_SELECTABLE)


def selection_size(name: str, inputs: PolicyLossInputs, num_tokens: Tensor) -> Tensor:
    """Number of tokens that are selected out of ``num_tokens`` (0-d) of the mini-batch; at least 1."""
    share = inputs.parameters.kl_cov_ratio if name == "kl_cov" else inputs.parameters.clip_cov_ratio
    return (num_tokens.to(torch.float64) * share).floor().clamp(min=1).to(torch.int64)


def selection_threshold(scores: Tensor, size: Tensor) -> Tensor:
    """The score of the last selected token: the ``size``-th largest; the smallest when there are fewer.

    Args:
        scores: any shape, int64; of the whole mini-batch, or the ``size`` largest of each of its parts.
        size: 0-d, int64, >= 1.

    Returns:
        0-d, int64; the smallest int64 when fewer than ``size`` tokens can be selected, which selects them
        all.
    """
    # sort and gather: topk needs its k on the host, which would wait for the device.
    ordered: Tensor = scores.flatten().sort(descending=True).values
    return ordered.gather(0, (size - 1).clamp(max=ordered.numel() - 1).reshape(1)).squeeze(0)


def _selected(name: str, inputs: PolicyLossInputs) -> Tensor:
    """The selected share of each token, [B, T], in [0, 1]; a fraction only for tokens with equal scores at
    the threshold."""
    # Without statistics the mini-batch is given whole, as in a notebook.
    statistics = inputs.mini_batch_statistics or mini_batch_statistics(name, [inputs])
    assert isinstance(statistics, Selection)
    scores = selection_scores(name, inputs, statistics.advantage_mean, statistics.log_prob_mean)
    at_threshold = (scores == statistics.score_threshold) * statistics.share_at_threshold
    return at_threshold.where(scores <= statistics.score_threshold, 1).where(scores > _NOT_SELECTABLE, 0)


def _token_hash(inputs: PolicyLossInputs) -> Tensor:
    """A pseudo-random number of ``_HASH_BITS`` bits per token, int64 [B, T], from what does not change during
    an update."""
    # Bits, not values: a float product would round, and differently on CPU and GPU.
    log_prob_bits = inputs.ratio_denominator.to(torch.float32).view(torch.int32).to(torch.int64)
    advantage_bits = inputs.advantages.to(torch.float32).view(torch.int32).to(torch.int64)
    position = torch.arange(inputs.log_probs.shape[-1], device=inputs.log_probs.device)
    # Primes of a spatial hash (Teschner et al. 2003), then two rounds with odd constants of xxHash and
    # MurmurHash3. int64 products wrap around modulo 2**64 on every device.
    mixed = (log_prob_bits * 73856093) ^ (advantage_bits * 19349663) ^ (position * 83492791)
    mixed = (mixed ^ (mixed >> 17)) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 29)) * 0x85EBCA6B
    # The upper bits: the lowest bits of a product depend on the lowest bits of its factors alone.
    return (mixed >> 20) & ((1 << _HASH_BITS) - 1)


def _ordered_bits(values: Tensor) -> Tensor:
    """Integers of 32 bits (as int64) in the order of the float32 ``values``; 0.0 and −0.0 are the same
    number."""
    # IEEE 754 stores sign and magnitude, so the bits of negative numbers are ordered the other way round.
    bits = values.view(torch.int32).to(torch.int64)
    return bits.where(bits >= 0, -(bits & 0x7FFFFFFF))
