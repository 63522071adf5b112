"""The loss of a micro-batch from the model's current output and the rows of the batch; where the actor
corrects, rollout correction of the current or interpolated policy against the rollout policy first."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.algorithm.losses import (
    Aggregation,
    MiniBatchStatistics,
    PolicyLossInputs,
    TopTokens,
    clean_policy_loss_inputs,
    compute_distillation_loss,
    compute_entropy_loss,
    compute_kl_loss,
    compute_value_loss,
    loss_options,
    resolve_policy_loss,
    token_mean,
)
from verl_rc.algorithm.ppo.choices import distillation_loss_name, policy_loss_name
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.models import ActorConfig, CriticConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import (
    CorrectionStatistics,
    SequenceContext,
    correct_sequences,
    interpolate_proximal,
    measure,
)
from verl_rc.metrics.mergeable import Mean
from verl_rc.records.batches import CriticBatch, TokenScores, TrainBatch


@dataclass(frozen=True)
class Objective:
    """The loss of one micro-batch: its share of the mini-batch's loss."""

    loss: Tensor
    """Scalar with a gradient; shares of all micro-batches and ranks add up to the mini-batch's loss."""
    terms: Mapping[str, Tensor]
    """Detached shares by metric name (``actor/pg_loss``, …); they add up as the loss does."""
    averages: Mapping[str, Mean[Tensor]]
    """Averages by metric name; those of all micro-batches and ranks merge."""


def policy_objective(
    current: TokenScores,
    batch: TrainBatch,
    config: ActorConfig,
    correction: RolloutCorrectionConfig,
    totals: Aggregation,
    mini_batch: MiniBatchStatistics | None = None,
    distillation: DistillationLossConfig | None = None,
) -> Objective:
    """``L = L_policy - entropy_coeff * agg(entropy) + kl_loss_coef * agg(KL) + distillation_loss_coef *
    L_distill`` over ``loss_mask``, divided by ``totals``; without the task's rewards L_distill replaces
    L_policy.

    ``current`` are float32 ``[B, R]`` with gradient, with entropies where the actor corrects or
    ``entropy_coeff`` is not 0. ``totals`` are counts of the whole mini-batch by
    ``correction.rejection_denominator``, ``mini_batch`` its statistics for losses that read them.
    """
    denominator_mask = batch.loss_mask if correction.rejection_denominator == "kept" else batch.response_mask
    inputs = clean_policy_loss_inputs(
        PolicyLossInputs(
            ratio_denominator=ratio_denominator(batch, current.log_probs, correction),
            log_probs=current.log_probs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            response_mask=batch.response_mask,
            denominator_mask=denominator_mask,
            rollout_is_weights=batch.rollout_is_weights,
            parameters=loss_options(config),
            aggregation=totals,
            mini_batch_statistics=mini_batch,
        )
    )
    losses: list[Tensor] = []
    terms: dict[str, Tensor] = {}
    averages: dict[str, Mean[Tensor]] = {}
    if distillation is None or distillation.use_task_rewards:
        policy_loss, policy_metrics = resolve_policy_loss(policy_loss_name(config, correction))(inputs)
        losses.append(policy_loss)
        terms["actor/pg_loss"] = policy_loss.detach()
        averages |= policy_metrics
    if distillation is not None:
        assert batch.teacher_log_probs is not None
        teacher_loss, teacher_metrics = compute_distillation_loss(
            replace(inputs, parameters=loss_options(distillation)),
            batch.teacher_log_probs,
            distillation.loss_mode,
            distillation.loss_max_clamp,
            distillation_loss_name(distillation, correction),
            _top_tokens(current, batch, distillation),
        )
        losses.append(distillation.distillation_loss_coef * teacher_loss if losses else teacher_loss)
        terms["distillation/loss"] = teacher_loss.detach()
        averages |= teacher_metrics
    loss = sum(losses[1:], losses[0])
    if correction.in_actor:  # actor/entropy, of the proximal policy before the update, is not known here
        assert current.entropies is not None
        averages["actor/update_entropy"] = token_mean(current.entropies, batch.response_mask)
    if current.flipped_experts is not None:
        averages["actor/flipped_experts"] = token_mean(current.flipped_experts, batch.response_mask)
    if config.entropy_coeff != 0:
        assert current.entropies is not None
        entropy = compute_entropy_loss(current.entropies, batch.loss_mask, denominator_mask, totals)
        loss = loss - config.entropy_coeff * entropy
        terms["actor/entropy_loss"] = entropy.detach()
    if config.use_kl_loss:
        assert batch.reference_log_probs is not None
        divergence, divergence_metrics = compute_kl_loss(
            current.log_probs,
            batch.reference_log_probs,
            config.kl_loss_type,
            batch.loss_mask,
            denominator_mask,
            totals,
        )
        loss = loss + config.kl_loss_coef * divergence
        averages |= divergence_metrics
    terms["actor/loss"] = loss.detach()
    return Objective(loss, terms, averages)


def _top_tokens(
    current: TokenScores, batch: TrainBatch, distillation: DistillationLossConfig
) -> TopTokens | None:
    if distillation.loss_mode != "forward_kl_topk":
        return None
    assert batch.teacher_top_log_probs is not None
    assert current.candidate_log_probs is not None
    return TopTokens(
        batch.teacher_top_log_probs, current.candidate_log_probs, distillation.log_prob_min_clamp
    )


def ratio_denominator(batch: TrainBatch, current: Tensor, correction: RolloutCorrectionConfig) -> Tensor:
    """float32 ``[B, R]``: log-probs of the policy in the denominator of the loss's ratio: the rollout policy
    in bypass mode, else the proximal policy."""
    log_probs = batch.rollout_log_probs if correction.bypass_mode else batch.proximal_log_probs
    assert log_probs is not None
    if correction.nonfinite_logprob == "neutral":  # such a token has a ratio of 1
        return log_probs.where(log_probs.isfinite(), current.detach())
    return log_probs


def value_objective(
    values: Tensor, batch: CriticBatch, config: CriticConfig, totals: Aggregation
) -> Objective:
    """The clipped value loss of ``values`` (float32 ``[B, R]``, with gradient), divided by the mini-batch's
    ``totals``."""
    loss, averages = compute_value_loss(
        values, batch.critic_values, batch.returns, batch.response_mask, config.cliprange_value, totals
    )
    return Objective(loss, {"critic/vf_loss": loss.detach()}, averages)


def statistics_inputs(
    batch: TrainBatch, log_probs: Tensor, config: ActorConfig, correction: RolloutCorrectionConfig
) -> PolicyLossInputs:
    """A micro-batch with its current log-probs (float32 ``[B, R]``, nats, detached), as the loss sees it."""
    return clean_policy_loss_inputs(
        PolicyLossInputs(
            ratio_denominator=ratio_denominator(batch, log_probs, correction),
            log_probs=log_probs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            response_mask=batch.response_mask,
            denominator_mask=batch.response_mask,
            parameters=loss_options(config),
        )
    )


def corrected_current(
    batch: TrainBatch,
    log_probs: Tensor,
    config: RolloutCorrectionConfig,
    policy_version: int,
    mini_batch: CorrectionStatistics | None = None,
) -> tuple[TrainBatch, CorrectionStatistics]:
    """The micro-batch with ``loss_mask`` and weights by the ratio of ``log_probs`` to the batch's rollout
    log-probs, and mergeable statistics of that ratio.

    ``log_probs`` (float32 ``[B, R]``, nats, detached) are current ones, or those of the interpolated proximal
    policy. The statistics lack effective sample sizes of prompts, whose rows may lie on several ranks.
    ``mini_batch`` are the statistics of the whole mini-batch, for weights that are normalised by its mean.
    """
    context = SequenceContext(
        policy_versions=batch.policy_versions,
        current_version=policy_version,
        advantages=batch.advantages,
        scores=batch.scores,
    )
    result = correct_sequences(
        log_probs, _rollout_log_probs(batch), _comparable(batch), config, context, mini_batch
    )
    corrected = batch.clone(recurse=False)
    corrected.loss_mask = batch.response_mask & batch.loss_mask & result.keep_mask
    corrected.rollout_is_weights = result.weights if config.applies_weights else None
    return corrected, result.statistics


def _comparable(batch: TrainBatch) -> Tensor:
    return batch.tokens.mask_of_known_distribution(batch.response_mask)


def _rollout_log_probs(batch: TrainBatch) -> Tensor:
    assert batch.rollout_log_probs is not None  # where the actor corrects
    return batch.rollout_log_probs


def measure_signatures(batch: TrainBatch, current: TokenScores) -> CorrectionStatistics:
    """Mergeable statistics with the signatures of a micro-batch, which are meaningful before the first update
    alone."""
    context = SequenceContext(
        entropies=current.entropies,
        sum_pi_squared=current.sum_pi_squared,
        varentropies=current.varentropies,
        engines=batch.engines,
    )
    config = RolloutCorrectionConfig(diagnostics="full")
    return measure(current.log_probs, _rollout_log_probs(batch), _comparable(batch), config, context)


def with_interpolated_proximal(
    batch: TrainBatch, log_probs: Tensor, policy_version: int, updates: int, updates_per_step: int
) -> TrainBatch:
    """The micro-batch with log-probs of the proximal policy between those of the rollout policy and current
    ``log_probs``.

    Versions count optimizer updates here: ``updates`` of ``updates_per_step`` were made since
    ``policy_version``. Before the first update current and proximal policy are the same. A token without a
    finite rollout log-prob gets the current one.
    """
    proximal = log_probs
    if updates:
        assert batch.policy_versions is not None
        first = policy_version * updates_per_step
        versions = batch.policy_versions * updates_per_step
        rollout = _rollout_log_probs(batch)
        proximal = interpolate_proximal(rollout, log_probs, versions, first, first + updates)
        proximal = torch.where(rollout.isfinite(), proximal, log_probs)
    interpolated = batch.clone(recurse=False)
    interpolated.proximal_log_probs = proximal
    return interpolated


def interpolation_gap(interpolated: TrainBatch, recomputed: TrainBatch) -> dict[str, Mean[Tensor]]:
    """The distance of interpolated log-probs of the proximal policy from recomputed ones."""
    assert interpolated.proximal_log_probs is not None
    assert recomputed.proximal_log_probs is not None
    gap = (interpolated.proximal_log_probs - recomputed.proximal_log_probs).abs()
    return {"actor/proximal_interpolation_gap": token_mean(gap, recomputed.response_mask)}


def loss_counts(batch: TrainBatch) -> Tensor:
    """int64 ``[2]``: tokens in the loss, and rows with at least one of them."""
    return torch.stack([batch.loss_mask.sum(), batch.loss_mask.any(dim=-1).sum()])
