"""From scored rollouts and the policies' evaluations to the batch the actor trains on."""

import torch
from torch import Tensor

from verl_rc.advantage import compute_advantages
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.correction import CorrectionResult, compute_rollout_correction
from verl_rc.data.batches import PolicyEvaluations, RolloutBatch, TrainBatch


def build_train_batch(
    rollouts: RolloutBatch, scores: Tensor, evaluations: PolicyEvaluations, algorithm: AlgorithmConfig
) -> tuple[TrainBatch, CorrectionResult]:
    """Rollout correction (decoupled: proximal against rollout policy), then advantages.

    ``scores`` float32 ``[B]`` are outcome scores. Correction decides weights and ``loss_mask`` only; rewards,
    advantages and their statistics use ``response_mask``, so a reward on a rejected token is never lost.
    """
    config = algorithm.rollout_correction
    rewards = outcome_rewards(scores, rollouts.response_mask)

    def advantages_of(included_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        return compute_advantages(
            algorithm.adv_estimator,
            rewards,
            rollouts.response_mask,
            group_ids=rollouts.group_ids,
            included_rows=included_rows,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )

    excluded = config.rejected_in_group_baseline == "exclude"
    advantages, returns = advantages_of(None)
    correction = compute_rollout_correction(
        evaluations.old_log_probs,
        rollouts.rollout_log_probs,
        rollouts.response_mask,
        config,
        advantages=None if excluded else advantages,
        group_ids=rollouts.group_ids,
        policy_versions=rollouts.policy_versions,
        scores=scores,
    )
    if excluded:
        advantages, returns = advantages_of(~correction.rejected_rows)
    batch = TrainBatch(
        tokens=rollouts.tokens,
        response_mask=rollouts.response_mask,
        loss_mask=rollouts.response_mask & correction.keep_mask,
        old_log_probs=evaluations.old_log_probs,
        rollout_log_probs=rollouts.rollout_log_probs,
        advantages=advantages,
        returns=returns,
        rollout_is_weights=correction.weights,
        batch_size=rollouts.batch_size,
    )
    return batch, correction


def outcome_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """float32 ``[B, R]``: each row's score at its last token of ``response_mask`` (bool ``[B, R]``), 0 elsewhere."""
    width = response_mask.shape[1]
    positions = torch.arange(width, device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=-1)
    return torch.where(positions == last[:, None], scores[:, None].float(), 0.0)
