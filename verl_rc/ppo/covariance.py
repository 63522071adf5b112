"""What ``clip_cov`` and ``kl_cov`` look at: a micro-batch as these losses see it, and the statistics of its mini-batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_rc.config.actor import ActorConfig, CovarianceLoss
from verl_rc.data.batches import TrainBatch
from verl_rc.losses import (
    CovarianceStatistics,
    PolicyLossInputs,
    PolicyLossParameters,
    clean_policy_loss_inputs,
    covariance_means,
    selection_scores,
    selection_size,
    selection_threshold,
)

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a tensor up over the ranks that share a mini-batch."""
GatherOverRanks = Callable[[Tensor], Tensor]
"""Puts a vector of every rank behind those of the ranks before it."""


def covariance_inputs(batch: TrainBatch, log_probs: Tensor, config: ActorConfig) -> PolicyLossInputs:
    """A micro-batch with its current log-probs (float32 ``[B, R]``, nats, detached), as the loss sees it."""
    return clean_policy_loss_inputs(
        PolicyLossInputs(
            old_log_probs=batch.old_log_probs,
            log_probs=log_probs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            response_mask=batch.response_mask,
            denominator_mask=batch.response_mask,
            parameters=PolicyLossParameters.from_config(config),
        )
    )


def covariance_statistics(
    name: CovarianceLoss, micro_batches: Sequence[PolicyLossInputs], over_ranks: SumOverRanks, from_ranks: GatherOverRanks
) -> CovarianceStatistics:
    """Statistics of a mini-batch from this rank's share of it (at least one micro-batch) and what the other ranks add.

    Means are taken over all tokens of the mini-batch that are in the loss; then its tokens are ordered, and the score of the
    last one that is selected is found among the best of every rank. So neither micro-batches nor ranks change who is selected.
    """
    means = [part for inputs in micro_batches for part in covariance_means(inputs)]
    numerators = torch.stack([metric.numerator for metric in means]).view(-1, 2).sum(dim=0)
    tokens = torch.stack([metric.denominator for metric in means]).view(-1, 2).sum(dim=0)[:1]
    totals = over_ranks(torch.cat([numerators, tokens]))
    advantage_mean, log_prob_mean = (totals[:2] / totals[2].clamp(min=1)).to(torch.float32)
    size = selection_size(name, micro_batches[0], totals[2])
    scores = torch.cat([selection_scores(name, inputs, advantage_mean, log_prob_mean).flatten() for inputs in micro_batches])
    best = scores.new_full((int(size),), -torch.inf)
    found = scores.topk(min(int(size), scores.numel())).values
    best[: found.numel()] = found
    return CovarianceStatistics(advantage_mean, log_prob_mean, selection_threshold(from_ranks(best), size))
