"""The loss of a micro-batch from the model's current output and the rows of the batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from verl_rc.algorithm.losses.centering import SamplerHead, centering_term
from verl_rc.algorithm.ppo.choices import distillation_loss_name, policy_loss_name
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.models import ActorConfig, CriticConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import LogRatio, candidate_weights
from verl_rc.metrics.mergeable import Mean
from verl_rc.records.batches import CriticBatch, TokenScores, TrainBatch
from verl_rc.records.heads import heads


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

    ``current`` are float32 ``[B, R]`` with gradient, with entropies where ``entropy_coeff`` is not 0.
    ``totals`` are counts of the whole mini-batch by ``correction.rejection_denominator``, ``mini_batch`` its
    statistics for losses that read them.
    """
    denominator_mask = (
        batch.loss_mask if correction.rejection_denominator == "kept" else batch.untruncated_mask
    )
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
        loss_of_tokens = resolve_policy_loss(policy_loss_name(config, correction))
        policy_loss, policy_metrics = loss_of_tokens(inputs)
        if correction.score_centering.enabled:
            head = sampler_head(batch, current, correction)
            term, centering_metrics = centering_term(
                loss_of_tokens,
                inputs,
                head,
                divides_by_rollout=correction.mode == "bypass",
                weights=_weights_of_head(batch, current, head, correction),
            )
            policy_loss = policy_loss + term
            averages |= centering_metrics
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


def sampler_head(batch: TrainBatch, current: TokenScores, correction: RolloutCorrectionConfig) -> SamplerHead:
    """The engine's most likely tokens in each token's place, and all others as one where the configuration
    says so."""
    counts, values, log_probs = batch.tokens.head_counts, batch.tokens.head_ids, current.candidate_log_probs
    assert counts is not None
    assert values is not None
    assert log_probs is not None
    head = SamplerHead(heads(counts, values)[1], log_probs)
    return head.with_tail() if correction.score_centering.tail == "proportional" else head


def _weights_of_head(
    batch: TrainBatch, current: TokenScores, head: SamplerHead, correction: RolloutCorrectionConfig
) -> Tensor | None:
    settings = correction.settings().weights
    if settings is None or not correction.applies_weights:
        return None
    train = current.log_probs.detach() if correction.mode == "bypass" else batch.old_log_probs
    ratio = LogRatio.from_log_probs(train, batch.rollout_log_probs, batch.comparable_mask)
    return candidate_weights(ratio, settings, head.log_ratios)


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
    """float32 ``[B, R]``: log-probs of the policy in the denominator of the loss's ratio."""
    log_probs = batch.old_log_probs
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
