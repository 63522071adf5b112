"""Rollout correction in the actor (bypass mode): the current policy against the rollout policy, micro-batch by micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, RowContext, apply, measure
from verl_rc.data.batches import TrainBatch


@dataclass(frozen=True)
class MiniBatchCounts:
    """What a loss of a whole mini-batch is divided by."""

    num_tokens: int
    num_sequences: int


def measure_current(
    batch: TrainBatch, log_probs: Tensor, config: RolloutCorrectionConfig, policy_version: int
) -> CorrectionStatistics:
    """Mergeable statistics of current ``log_probs`` (float32 ``[B, R]``, nats, detached) over the batch's rollout log-probs.

    Those of a mini-batch are merged over its micro-batches and summed over the data-parallel ranks. Effective sample sizes of
    prompts are not among them: a prompt's rows may lie on several ranks.
    """
    full = config.diagnostics == "full"
    context = RowContext(
        policy_versions=batch.policy_versions if full else None,
        current_version=policy_version if full else None,
        advantages=batch.advantages,
        scores=batch.scores if full else None,
    )
    return measure(log_probs, batch.rollout_log_probs, batch.response_mask, config, context)


def correct_current(
    batch: TrainBatch, log_probs: Tensor, config: RolloutCorrectionConfig, statistics: CorrectionStatistics
) -> TrainBatch:
    """The micro-batch with ``loss_mask`` and weights as current ``log_probs`` (float32 ``[B, R]``, detached) demand.

    ``statistics`` need to be those of the whole mini-batch only where ``needs_statistics_first`` says so. Weights enter the
    loss ``reinforce`` alone: in ``ppo_clip`` the clipped ratio is itself current over rollout. A token that is to be neutral
    gets the current policy for its rollout policy, and so a ratio of 1.
    """
    weights, keep = apply(
        log_probs, batch.rollout_log_probs, batch.response_mask, config, statistics, advantages=batch.advantages
    )
    corrected = batch.clone(recurse=False)
    if config.nonfinite_logprob == "neutral":
        known = batch.old_log_probs.isfinite()
        corrected.old_log_probs = torch.where(known, batch.old_log_probs, log_probs)
    corrected.loss_mask = batch.response_mask & keep
    corrected.rollout_is_weights = weights if config.loss_type == "reinforce" else None
    return corrected


def kept_counts(statistics: CorrectionStatistics) -> MiniBatchCounts:
    """Tokens that are kept, and rows with at least one such token, of the rows measured."""
    totals = statistics.numbers().totals
    return MiniBatchCounts(int(totals.kept_tokens), int(totals.kept_rows))
