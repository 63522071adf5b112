"""Building the batch that the actor trains on, from scored rollouts and the models' evaluations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.algorithm.advantage import apply_kl_in_reward, compute_advantages
from verl_rc.algorithm.ppo.corrector import Corrector
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.correction import CorrectionResult, compute_rollout_correction
from verl_rc.records.batches import CriticBatch, PolicyEvaluations, RolloutBatch, TrainBatch
from verl_rc.records.scored_batch import ScoredBatch


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's updates, and what they were computed from."""

    scored: ScoredBatch
    evaluations: PolicyEvaluations
    batch: TrainBatch
    """The batch for the actor."""
    correction: CorrectionResult | None
    """Rollout correction in the driver. None where the actor corrects."""
    rewards: Tensor
    """float32 ``[B, R]``: token-level rewards, after the KL penalty."""
    returns: Tensor
    """float32 ``[B, R]``: regression targets of the critic, in units of reward."""
    reward_kl: float | None
    """Penalised divergence from the reference policy, mean over rows of their token mean, nats; None without
    ``algorithm.use_kl_in_reward``."""

    @property
    def mean_entropy(self) -> float | None:
        """Entropy of the proximal policy, mean over response tokens, nats. None where it is not evaluated."""
        entropies = self.evaluations.entropies
        return None if entropies is None else float(entropies[self.batch.response_mask].double().mean())

    @property
    def measured(self) -> Measured | None:
        """The statistics of the correction. None where the actor corrects."""
        if self.correction is None:
            return None
        return Measured(self.correction.statistics, before_update=self.correction.statistics)


def build_train_batch(
    scored: ScoredBatch,
    evaluations: PolicyEvaluations,
    algorithm: AlgorithmConfig,
    corrector: Corrector,
    kl_coef: float,
    current_version: int,
    max_token_age: int | None = None,
) -> StepInputs:
    """KL penalty, then advantages, and rollout correction where ``corrector`` makes it before the update.

    ``kl_coef`` is the current weight of the KL penalty. ``current_version`` is that of the proximal policy,
    the training steps done, from which ages of tokens count. Correction decides weights and ``loss_mask``
    alone; rewards, advantages and their statistics use ``response_mask``, so that a reward on a rejected
    token is never lost. Tokens older than ``max_token_age`` leave the loss, and so do truncated responses
    with ``mask_truncated_responses``, and tokens that were drawn from a set that is not recorded: the
    trainer's log-probs are of another distribution.
    """
    rollouts = scored.rollouts
    old_log_probs = corrector.log_probs_for_rewards(rollouts, evaluations)
    rewards, reward_kl = _rewards(scored, old_log_probs, evaluations, algorithm, kl_coef)
    weights = _weights_for_baseline(rollouts, old_log_probs, algorithm, corrector)

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
            reward_baselines=scored.reward_baselines,
            component_scores=scored.component_scores,
            component_weights=algorithm.gdpo_reward_weights,
            old_log_probs=old_log_probs,
            sum_pi_squared=evaluations.sum_pi_squared,
            rollout_is_weights=weights,
        )

    if corrector.config.rejected_in_group_baseline == "exclude":
        correction = corrector.before_update(scored, evaluations, None, current_version)
        advantages, returns = estimate_advantages(None if correction is None else ~correction.rejected_rows)
    else:
        advantages, returns = estimate_advantages(None)
        correction = corrector.before_update(scored, evaluations, advantages, current_version)
    loss_mask = rollouts.comparable_mask
    if correction is not None:
        loss_mask = loss_mask & correction.keep_mask
    if max_token_age is not None:
        loss_mask = loss_mask & (current_version - rollouts.policy_versions <= max_token_age)
    finished = rollouts.finished if algorithm.mask_truncated_responses else None
    if finished is not None:
        loss_mask = loss_mask & finished[:, None]
    proximal = evaluations.proximal_log_probs
    batch = TrainBatch(
        tokens=rollouts.tokens,
        response_mask=rollouts.response_mask,
        loss_mask=loss_mask,
        advantages=advantages,
        old_log_probs=old_log_probs if proximal is None else proximal,
        rollout_log_probs=rollouts.rollout_log_probs,
        policy_versions=rollouts.policy_versions,
        scores=scored.scores,
        rollout_is_weights=None if correction is None else correction.weights,
        reference_log_probs=evaluations.reference_log_probs,
        teacher_log_probs=evaluations.teacher_log_probs,
        teacher_top_ids=evaluations.teacher_top_ids,
        teacher_top_log_probs=evaluations.teacher_top_log_probs,
        engines=rollouts.engines,
        finished=finished,
        batch_size=rollouts.batch_size,
    )
    return StepInputs(scored, evaluations, batch, correction, rewards, returns, reward_kl)


def _weights_for_baseline(
    rollouts: RolloutBatch, old_log_probs: Tensor, algorithm: AlgorithmConfig, corrector: Corrector
) -> Tensor | None:
    """Importance weights ``[B, R]`` for a baseline that reads them. None for other baselines, and where
    correction has no weights.

    Weights do not depend on advantages, so that they can be computed first. Rejection rules that do get
    advantages of 0, and their result is not used.
    """
    if corrector.config.rollout_is is None or not algorithm.estimator_reads("rollout_is_weights"):
        return None
    return compute_rollout_correction(
        old_log_probs,
        rollouts.rollout_log_probs,
        rollouts.comparable_mask,
        corrector.config.model_copy(update={"diagnostics": "core"}),
        advantages=torch.zeros_like(old_log_probs),
    ).weights


def critic_batch(inputs: StepInputs) -> CriticBatch:
    """The training batch of the critic in the same step."""
    batch, values = inputs.batch, inputs.evaluations.critic_values
    assert values is not None
    return CriticBatch(
        tokens=batch.tokens.without("experts", "head"),
        response_mask=batch.response_mask,
        critic_values=values,
        returns=inputs.returns,
        batch_size=batch.batch_size,
    )


def _rewards(
    scored: ScoredBatch,
    old_log_probs: Tensor,
    evaluations: PolicyEvaluations,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[Tensor, float | None]:
    rollouts, spec = scored.rollouts, algorithm.estimator
    by_turn = None if spec is not None and spec.subtracts_total else rollouts.turn_rewards
    outcome = token_rewards(scored.scores, by_turn, rollouts.response_mask)
    if not algorithm.use_kl_in_reward:
        return outcome, None
    assert evaluations.reference_log_probs is not None
    rewards, divergence = apply_kl_in_reward(
        outcome,
        old_log_probs,
        evaluations.reference_log_probs,
        rollouts.response_mask,
        kl_coef,
        algorithm.kl_penalty,
    )
    answered = rollouts.response_mask.any(dim=-1)
    return rewards, float(divergence[answered].double().mean()) if bool(answered.any()) else 0.0


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
