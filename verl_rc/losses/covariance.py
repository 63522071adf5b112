"""Restraining the few tokens whose advantage and log-prob vary together most."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_rc.config.actor import CovarianceLoss
from verl_rc.losses.inputs import CovarianceStatistics, LossMetrics, PolicyLossInputs
from verl_rc.losses.loss_metric import LossMetric

_HASH_RANGE = 1 << 24


def clip_cov_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """PPO clipping that also drops tokens of high covariance (Clip-Cov, arXiv:2505.22617); the loss mode ``clip_cov``.

    ``w f max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high))``; f is 0 for a share `clip_cov_ratio` of the mini-batch's
    tokens (at least one), drawn among those that are not clipped and have `clip_cov_lb` < cov < `clip_cov_ub`, with
    cov = (A − mean A)(lp − mean lp). The draw is a hash of the token's old log-prob, advantage and position, so it is
    reproducible and does not depend on micro-batches; identical tokens are dropped together. Rejected tokens enter
    neither the sum nor the means.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` (share of dropped tokens), `actor/ppo_kl` (mean of old − current, nats).
    """
    unclipped, clipped = _surrogates(inputs)
    dropped = _selected("clip_cov", inputs)
    token_loss = torch.maximum(unclipped, clipped)
    return inputs.reduce(token_loss.where(~dropped, 0)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(dropped),
        "actor/ppo_kl": inputs.mean_over_tokens(-inputs.log_ratio),
    }


def kl_cov_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The unclipped surrogate with a penalty on tokens of high covariance (KL-Cov, arXiv:2505.22617); ``kl_cov``.

    ``w (−A r + `ppo_kl_coef` |lp − lp_old| [selected])``; selected is the share `kl_cov_ratio` of the mini-batch's
    tokens (at least one) with the largest cov = (A − mean A)(lp − mean lp). Rejected tokens enter neither the sum nor
    the means.

    Returns:
        The loss, 0-d, and `actor/ppo_kl` (mean of |old − current|, nats).
    """
    log_ratio = inputs.log_ratio
    penalty = inputs.parameters.ppo_kl_coef * log_ratio.abs()
    selected = _selected("kl_cov", inputs)
    token_loss = -inputs.advantages * log_ratio.exp() + penalty.where(selected, 0)
    return inputs.reduce(token_loss), {"actor/ppo_kl": inputs.mean_over_tokens(log_ratio.abs())}


def covariance_means(inputs: PolicyLossInputs) -> tuple[LossMetric, LossMetric]:
    """Sums advantages and current log-probs over the trained tokens; add up over the mini-batch, then take means."""
    return inputs.mean_over_tokens(inputs.advantages), inputs.mean_over_tokens(inputs.log_probs)


def selection_scores(name: CovarianceLoss, inputs: PolicyLossInputs, advantage_mean: Tensor, log_prob_mean: Tensor) -> Tensor:
    """Orders the tokens by how early they are selected.

    Args:
        name: the loss; ``kl_cov`` orders by covariance, ``clip_cov`` by a hash among the tokens in its band.
        inputs: of a micro-batch.
        advantage_mean: 0-d; over the mini-batch.
        log_prob_mean: 0-d, nats; over the mini-batch.

    Returns:
        [B, T], dimensionless; −inf for tokens that cannot be selected.
    """
    covariance = (inputs.advantages - advantage_mean) * (inputs.log_probs.detach() - log_prob_mean)
    if name == "kl_cov":
        return covariance.where(inputs.loss_mask, covariance.new_full((), -math.inf))
    unclipped, clipped = _surrogates(inputs)
    in_band = (covariance > inputs.parameters.clip_cov_lb) & (covariance < inputs.parameters.clip_cov_ub)
    candidates = inputs.loss_mask & in_band & (clipped <= unclipped)
    return _token_hash(inputs).to(covariance.dtype).where(candidates, covariance.new_full((), -math.inf))


def selection_size(name: CovarianceLoss, inputs: PolicyLossInputs, num_tokens: Tensor) -> Tensor:
    """Number of tokens that are selected out of `num_tokens` (0-d) of the mini-batch; at least 1."""
    share = inputs.parameters.kl_cov_ratio if name == "kl_cov" else inputs.parameters.clip_cov_ratio
    return (num_tokens.to(torch.float64) * share).floor().clamp(min=1).to(torch.int64)


def selection_threshold(scores: Tensor, size: Tensor) -> Tensor:
    """Finds the score of the last selected token: the `size`-th largest; the smallest when there are fewer.

    Args:
        scores: any shape; of the whole mini-batch, or the `size` largest of each of its parts.
        size: 0-d, int64, >= 1.

    Returns:
        0-d; −inf when fewer than `size` tokens can be selected, which selects them all.
    """
    ordered: Tensor = scores.flatten().sort(descending=True).values
    return ordered.gather(0, (size - 1).clamp(max=ordered.numel() - 1).reshape(1)).squeeze(0)


def _selected(name: CovarianceLoss, inputs: PolicyLossInputs) -> Tensor:
    """Decides which tokens are selected, bool [B, T]."""
    statistics = inputs.covariance_statistics
    if statistics is None:
        advantage, log_prob = covariance_means(inputs)
        scores = selection_scores(name, inputs, advantage.mean(), log_prob.mean())
        size = selection_size(name, inputs, inputs.loss_mask.sum())
        statistics = CovarianceStatistics(advantage.mean(), log_prob.mean(), selection_threshold(scores, size))
    scores = selection_scores(name, inputs, statistics.advantage_mean, statistics.log_prob_mean)
    return (scores >= statistics.score_threshold) & (scores > -math.inf)


def _surrogates(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor]:
    ratio = inputs.log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - inputs.parameters.clip_ratio_low, 1 + inputs.parameters.clip_ratio_high)
    return -inputs.advantages * ratio, -inputs.advantages * clipped_ratio


def _token_hash(inputs: PolicyLossInputs) -> Tensor:
    """A pseudo-random number in [0, 1) per token, [B, T], from the bits of what does not change during an update."""
    log_prob_bits = inputs.old_log_probs.to(torch.float32).view(torch.int32).to(torch.int64)
    advantage_bits = inputs.advantages.to(torch.float32).view(torch.int32).to(torch.int64)
    position = torch.arange(inputs.log_probs.shape[-1], device=inputs.log_probs.device)
    mixed = (log_prob_bits * 73856093) ^ (advantage_bits * 19349663) ^ (position * 83492791)
    mixed = (mixed ^ (mixed >> 17)) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 29)) * 0x85EBCA6B
    number: Tensor = ((mixed >> 20) & (_HASH_RANGE - 1)).to(torch.float32)
    return number / _HASH_RANGE
