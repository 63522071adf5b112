"""Building the batch that the actor trains on, from scored rollouts and the models' evaluations."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from verl_rc.algorithm.advantage import apply_kl_in_reward, compute_advantages, whitened
from verl_rc.algorithm.ppo.corrector import Corrector
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.algorithms import EstimatorInput
from verl_rc.correction import CorrectionResult, SequenceContext, correct_rows
from verl_rc.records.batches import CriticBatch, PolicyEvaluations, TrainBatch
from verl_rc.records.ragged import Ragged
from verl_rc.records.scored_batch import ScoredBatch

_ELEMENTS = 1 << 18
"""Places ``[b, t]`` of a block of rows that is padded at once."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's updates, and what they were computed from: ``B`` rows, ``N`` response tokens."""

    scored: ScoredBatch
    evaluations: Ragged[PolicyEvaluations]
    batch: Ragged[TrainBatch]
    """The batch for the actor."""
    correction: CorrectionResult | None
    """Rollout correction in the driver, with columns ``[N]``. None where the actor corrects."""
    rewards: Tensor
    """float64 ``[B]``: sums of the token-level rewards, after the KL penalty."""
    returns: Tensor
    """float32 ``[N]``: regression targets of the critic, in units of reward."""
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
    evaluations: Ragged[PolicyEvaluations],
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
    weights = None
    if corrector.config.rollout_is is not None and algorithm.estimator_reads("rollout_is_weights"):
        # Weights do not depend on advantages, so that a baseline can read them. Rejection rules that do get
        # advantages of 0, and their result is not used.
        config = corrector.config.model_copy(update={"diagnostics": "core"})
        none = torch.zeros_like(old_log_probs)
        weights = correct_rows(rollouts, config, old_log_probs, SequenceContext(advantages=none)).weights
    estimate = partial(_estimate, scored, evaluations, algorithm, kl_coef, old_log_probs, weights)

    if corrector.config.rejected_in_group_baseline == "exclude":
        correction = corrector.before_update(scored, evaluations, None, current_version)
        estimated = estimate(None if correction is None else ~correction.rejected_rows)
    else:
        estimated = estimate(None)
        correction = corrector.before_update(scored, evaluations, estimated[0], current_version)
    advantages, returns, rewards, divergence = estimated
    loss_mask = rollouts.comparable_mask
    if correction is not None:
        loss_mask = loss_mask & correction.keep_mask
    if max_token_age is not None:
        loss_mask = loss_mask & (current_version - rollouts.policy_versions <= max_token_age)
    finished = rollouts.finished if algorithm.mask_truncated_responses else None
    if finished is not None:
        loss_mask = loss_mask & rollouts.at_tokens(finished)
    proximal = evaluations.proximal_log_probs
    batch = rollouts.become(
        TrainBatch,
        **{name: column for name, column in evaluations.columns.items() if name.startswith(_FROZEN)},
        loss_mask=loss_mask,
        advantages=advantages,
        old_log_probs=old_log_probs if proximal is None else proximal,
        scores=scored.scores,
        rollout_is_weights=None if correction is None else correction.weights,
        finished=finished,
    )
    reward_kl = None
    if algorithm.use_kl_in_reward:
        answered = rollouts.row_sums(rollouts.response_mask) > 0
        reward_kl = float(divergence[answered].double().mean()) if bool(answered.any()) else 0.0
    return StepInputs(scored, evaluations, batch, correction, rewards, returns, reward_kl)


_FROZEN = ("reference_", "teacher_")
"""Prefixes of what policies that only score say of tokens."""


def _estimate(
    scored: ScoredBatch,
    evaluations: Ragged[PolicyEvaluations],
    algorithm: AlgorithmConfig,
    kl_coef: float,
    old_log_probs: Tensor,
    weights: Tensor | None,
    included_rows: Tensor | None,
) -> tuple[Tensor, ...]:
    """Advantages and returns ``[N]``, the sum of each row's rewards and its divergence from the reference
    policy ``[B]``; of some whole groups at once where the estimator looks at no more."""
    rollouts, spec = scored.rollouts, algorithm.estimator
    # Rows that are left out are left out of whitening, too.
    is_whole = spec is None or spec.spans_batch or (spec.whitens and included_rows is not None)
    blocks = rollouts.blocks(sys.maxsize if is_whole else _ELEMENTS, rollouts.group_ids)
    columns: dict[EstimatorInput, Tensor | None] = {
        "values": evaluations.critic_values,
        "old_log_probs": old_log_probs,
        "sum_pi_squared": evaluations.sum_pi_squared,
        "rollout_is_weights": weights,
    }
    by_block = []
    for rows in blocks:
        mask = cast(Tensor, rollouts.pad(rollouts.response_mask, rows))
        rewards, divergence = _rewards(scored, evaluations, old_log_probs, algorithm, kl_coef, rows, mask)
        advantages, returns = compute_advantages(
            algorithm.adv_estimator,
            rewards,
            mask,
            group_ids=rollouts.group_ids[rows],
            included_rows=None if included_rows is None else included_rows[rows],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            turn_credit=algorithm.turn_credit,
            reward_baselines=None if scored.reward_baselines is None else scored.reward_baselines[rows],
            component_scores=None if scored.component_scores is None else scored.component_scores[rows],
            component_weights=algorithm.gdpo_reward_weights,
            **{
                name: rollouts.pad(column, rows)
                for name, column in columns.items()
                if spec is None or name in spec.inputs
            },
            is_whole=is_whole,
        )
        by_block.append((advantages, returns, rewards.sum(dim=-1), divergence))
    by_field = [list(values) for values in zip(*by_block, strict=True)]
    order = torch.tensor([row for rows in blocks for row in rows]).argsort()
    advantages = returns = rollouts.flattened(blocks, by_field[0])
    if any(one is not other for one, other, *_ in by_block):
        returns = rollouts.flattened(blocks, by_field[1])
    if not is_whole and spec is not None and spec.whitens:
        advantages, returns = whitened(advantages, returns, rollouts.response_mask)
    return advantages, returns, *(torch.cat(values)[order] for values in by_field[2:])


def critic_batch(inputs: StepInputs) -> Ragged[CriticBatch]:
    """The training batch of the critic in the same step."""
    values = inputs.evaluations.critic_values
    return inputs.batch.without("experts", "head").become(
        CriticBatch, critic_values=values, returns=inputs.returns
    )


def _rewards(
    scored: ScoredBatch,
    evaluations: Ragged[PolicyEvaluations],
    old_log_probs: Tensor,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    rows: list[int],
    response_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rewards of tokens ``[b, t]`` of some rows with this ``response_mask``, and the divergence of each row
    from the reference policy ``[b]``, 0 where it is not penalised."""
    rollouts, spec = scored.rollouts, algorithm.estimator
    subtracts = spec is not None and spec.subtracts_total
    by_turn = None if subtracts else rollouts.pad(rollouts.turn_rewards, rows)
    outcome = token_rewards(scored.scores[rows], by_turn, response_mask)
    if not algorithm.use_kl_in_reward:
        return outcome, torch.zeros(len(rows))
    return apply_kl_in_reward(
        outcome,
        cast(Tensor, rollouts.pad(old_log_probs, rows)),
        cast(Tensor, rollouts.pad(evaluations.reference_log_probs, rows)),
        response_mask,
        kl_coef,
        algorithm.kl_penalty,
    )


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
