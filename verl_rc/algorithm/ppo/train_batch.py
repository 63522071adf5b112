"""Building the batch that the actor trains on, from scored rollouts and the models' evaluations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.algorithm.advantage import apply_kl_in_reward, compute_advantages
from verl_rc.algorithm.ppo.control import Control
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionResult, CorrectionStatistics, compute_rollout_correction
from verl_rc.records.batches import CriticBatch, PolicyEvaluations, RolloutBatch, TrainBatch
from verl_rc.records.samples import Samples


@dataclass(frozen=True)
class ScoredStep:
    """The inputs of a step's updates, and the results they were computed from."""

    batch: TrainBatch
    """The batch for the actor."""
    correction: CorrectionResult | None
    """Rollout correction of the proximal policy; None where the actor corrects."""
    rewards: Tensor
    """float32 ``[B, R]``: token-level rewards, after the KL penalty."""
    returns: Tensor
    """float32 ``[B, R]``: regression targets of the critic, in units of reward."""
    reward_kl: float | None
    """Penalised divergence from the reference policy, mean over rows of their token mean, nats; None without
    ``algorithm.use_kl_in_reward``."""

    @property
    def statistics(self) -> CorrectionStatistics | None:
        """The statistics of the correction; None where the actor corrects."""
        return None if self.correction is None else self.correction.statistics


def build_train_batch(
    samples: Samples,
    evaluations: PolicyEvaluations,
    algorithm: AlgorithmConfig,
    control: Control,
    current_version: int,
    asynchrony: AsyncTrainingConfig | None = None,
) -> ScoredStep:
    """KL penalty, then rollout correction (decoupled: proximal against rollout policy), then advantages.

    ``control`` holds the current KL weight and threshold. ``current_version`` is that of the proximal policy,
    the training steps done, from which ages of tokens count. Correction decides weights and ``loss_mask``
    alone; rewards, advantages and their statistics use ``response_mask``, so that a reward on a rejected
    token is never lost. Where the actor corrects, nothing is corrected here. With ``asynchrony`` correction
    is measured by age of tokens, and tokens older than ``max_token_age`` leave the loss too. Tokens that were
    drawn from a set that is not recorded always leave it: the trainer's log-probs are of another
    distribution.
    """
    config = control.correction(algorithm.rollout_correction)
    rollouts, scores = samples.rollouts, samples.scores
    rewards, reward_kl = _rewards(rollouts, scores, evaluations, algorithm, control.kl_coef)
    full = config.diagnostics == "full"
    asynchronous = asynchrony is not None and not asynchrony.is_synchronous
    versions = rollouts.policy_versions if full or asynchronous else None
    comparable = rollouts.tokens.mask_of_known_distribution(rollouts.response_mask)
    weights = _weights_for_baseline(rollouts, comparable, evaluations, algorithm, config)

    def estimate_advantages(included_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        return compute_advantages(
            algorithm.adv_estimator,
            rewards,
            rollouts.response_mask,
            group_ids=rollouts.group_ids,
            values=evaluations.critic_values,
            included_rows=included_rows,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            turn_credit=algorithm.turn_credit,
            reward_baselines=samples.reward_baselines,
            component_scores=samples.component_scores,
            component_weights=algorithm.gdpo_reward_weights,
            old_log_probs=_old_log_probs(rollouts, evaluations, config),
            sum_pi_squared=evaluations.sum_pi_squared,
            rollout_is_weights=weights,
        )

    def corrected(advantages: Tensor | None) -> CorrectionResult:
        assert evaluations.proximal_log_probs is not None
        return compute_rollout_correction(
            evaluations.proximal_log_probs,
            rollouts.rollout_log_probs,
            comparable,
            config,
            advantages=advantages,
            group_ids=rollouts.group_ids,
            policy_versions=versions,
            scores=scores,
            entropies=evaluations.entropies,
            sum_pi_squared=evaluations.sum_pi_squared,
            varentropies=evaluations.varentropies,
            engines=rollouts.engines,
            current_version=current_version,
        )

    correction: CorrectionResult | None = None
    if config.rejected_in_group_baseline == "exclude":  # in decoupled mode alone
        correction = corrected(None)
        advantages, returns = estimate_advantages(~correction.rejected_rows)
    else:
        advantages, returns = estimate_advantages(None)
        correction = None if config.in_actor else corrected(advantages)
    loss_mask = comparable
    if correction is not None:
        loss_mask = loss_mask & correction.keep_mask
    if asynchrony is not None and asynchrony.max_token_age is not None:
        loss_mask = loss_mask & (current_version - rollouts.policy_versions <= asynchrony.max_token_age)
    batch = TrainBatch(
        tokens=rollouts.tokens,
        response_mask=rollouts.response_mask,
        loss_mask=loss_mask,
        proximal_log_probs=evaluations.proximal_log_probs,
        advantages=advantages,
        rollout_log_probs=rollouts.rollout_log_probs if config.in_actor else None,
        rollout_is_weights=None if correction is None else correction.weights,
        reference_log_probs=evaluations.reference_log_probs,
        teacher_log_probs=evaluations.teacher_log_probs,
        teacher_top_ids=evaluations.teacher_top_ids,
        teacher_top_log_probs=evaluations.teacher_top_log_probs,
        scores=scores if config.in_actor and full else None,
        policy_versions=versions if config.in_actor else None,
        engines=rollouts.engines if config.in_actor and full else None,
        batch_size=rollouts.batch_size,
    )
    return ScoredStep(batch, correction, rewards, returns, reward_kl)


def _weights_for_baseline(
    rollouts: RolloutBatch,
    comparable: Tensor,
    evaluations: PolicyEvaluations,
    algorithm: AlgorithmConfig,
    config: RolloutCorrectionConfig,
) -> Tensor | None:
    """Importance weights ``[B, R]`` for baselines that read them; None for others, and without weights.

    Weights do not depend on advantages, so that they can be computed first. Rejection rules that do get
    advantages of 0, and their result is not used.
    """
    if config.rollout_is is None or not algorithm.estimator_reads("rollout_is_weights"):
        return None
    assert evaluations.proximal_log_probs is not None  # in bypass mode no such estimator is accepted
    return compute_rollout_correction(
        evaluations.proximal_log_probs,
        rollouts.rollout_log_probs,
        comparable,
        config.model_copy(update={"diagnostics": "core"}),
        advantages=torch.zeros_like(evaluations.proximal_log_probs),
    ).weights


def critic_batch(scored: ScoredStep, evaluations: PolicyEvaluations) -> CriticBatch:
    """The training batch of the critic in the same step."""
    batch = scored.batch
    assert evaluations.critic_values is not None
    return CriticBatch(
        tokens=batch.tokens.without_experts(),
        response_mask=batch.response_mask,
        critic_values=evaluations.critic_values,
        returns=scored.returns,
        batch_size=batch.batch_size,
    )


def _rewards(
    rollouts: RolloutBatch,
    scores: Tensor,
    evaluations: PolicyEvaluations,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[Tensor, float | None]:
    spec = algorithm.estimator
    by_turn = None if spec is not None and spec.subtracts_total else rollouts.turn_rewards
    outcome = token_rewards(scores, by_turn, rollouts.response_mask)
    if not algorithm.use_kl_in_reward:
        return outcome, None
    assert evaluations.reference_log_probs is not None
    rewards, divergence = apply_kl_in_reward(
        outcome,
        _old_log_probs(rollouts, evaluations, algorithm.rollout_correction),
        evaluations.reference_log_probs,
        rollouts.response_mask,
        kl_coef,
        algorithm.kl_penalty,
    )
    answered = rollouts.response_mask.any(dim=-1)
    return rewards, float(divergence[answered].double().mean()) if bool(answered.any()) else 0.0


def _old_log_probs(
    rollouts: RolloutBatch, evaluations: PolicyEvaluations, config: RolloutCorrectionConfig
) -> Tensor:
    """Log-probs of the policy before the update, for rewards and baselines: of the proximal policy, or where
    the actor corrects of the rollout policy, in every step."""
    if config.in_actor:
        return rollouts.rollout_log_probs
    assert evaluations.proximal_log_probs is not None
    return evaluations.proximal_log_probs


def token_rewards(scores: Tensor, turn_rewards: Tensor | None, response_mask: Tensor) -> Tensor:
    """float32 ``[B, R]``: ``turn_rewards`` (``[B, R]``. None means 0), plus at each row's last token of
    ``response_mask`` (bool ``[B, R]``) its score (``[B]``) minus the sum of its turn rewards."""
    if turn_rewards is None:
        return outcome_rewards(scores, response_mask)
    remainder = scores.double() - turn_rewards.sum(dim=-1, dtype=torch.float64)
    return turn_rewards + outcome_rewards(remainder, response_mask)


def outcome_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """float32 ``[B, R]``: each row's score at its last token of ``response_mask`` (bool ``[B, R]``), 0
    elsewhere."""
    width = response_mask.shape[1]
    positions = torch.arange(width, device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=-1)
    return torch.where(positions == last[:, None], scores[:, None].float(), 0.0)
