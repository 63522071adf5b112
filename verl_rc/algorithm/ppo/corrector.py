"""Who corrects, as two values with the same methods.

``InDriver``: the driver corrects the proximal policy against the rollout policy, before the update (decoupled
mode). ``InActor``: the actor corrects the current policy (bypass mode), or a proximal policy interpolated
from rollout and current policy, mini-batch by mini-batch during the update. ``config.mode`` names the three.
"""

from dataclasses import dataclass

from torch import Tensor

from verl_rc.algorithm.ppo.in_actor import (
    ActorCorrection,
    Corrected,
    MiniBatchCorrection,
    OverRanks,
)
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionResult, compute_rollout_correction
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch
from verl_rc.records.scored_batch import ScoredBatch

_STEPS_BETWEEN_COMPARISONS = 50


@dataclass(frozen=True)
class InDriver:
    """The driver corrects, before the update."""

    config: RolloutCorrectionConfig
    """With the threshold of the step."""
    by_age: bool
    """The gap is measured by age of tokens, too."""

    def evaluates_proximal(self, step: int) -> bool:
        """Whether log-probs of the proximal policy are computed before the updates of ``step``."""
        del step
        return True

    def log_probs_for_rewards(self, rollouts: RolloutBatch, evaluations: PolicyEvaluations) -> Tensor:
        """float32 ``[B, R]``: log-probs of the policy before the update, for rewards and baselines."""
        del rollouts
        return _proximal(evaluations)

    def before_update(
        self,
        scored: ScoredBatch,
        evaluations: PolicyEvaluations,
        advantages: Tensor | None,
        current_version: int,
    ) -> CorrectionResult | None:
        """Correct the batch; None where the actor corrects. ``current_version`` is that of the proximal
        policy, from which ages of tokens count."""
        rollouts = scored.rollouts
        return compute_rollout_correction(
            _proximal(evaluations),
            rollouts.rollout_log_probs,
            rollouts.comparable_mask,
            self.config,
            advantages=advantages,
            group_ids=rollouts.group_ids,
            policy_versions=rollouts.policy_versions if self.by_age else None,
            scores=scored.scores,
            entropies=evaluations.entropies,
            sum_pi_squared=evaluations.sum_pi_squared,
            varentropies=evaluations.varentropies,
            engines=rollouts.engines,
            current_version=current_version,
        )

    def during_update(self, policy_version: int, num_updates: int, ranks: OverRanks) -> MiniBatchCorrection:
        """The correction of the update's mini-batches on one rank.

        ``policy_version`` is that of the weights before the update of ``num_updates`` mini-batches; ``ranks``
        share each of these.
        """
        del policy_version, num_updates, ranks
        return Corrected()


@dataclass(frozen=True)
class InActor:
    """The actor corrects, during the update."""

    config: RolloutCorrectionConfig
    """With the threshold of the step."""
    by_age: bool
    """The gap is measured by age of tokens, too."""

    def evaluates_proximal(self, step: int) -> bool:
        """True where the proximal policy is interpolated, in every 50th step, for a comparison."""
        return self.config.proximal == "interpolate" and step % _STEPS_BETWEEN_COMPARISONS == 0

    def log_probs_for_rewards(self, rollouts: RolloutBatch, evaluations: PolicyEvaluations) -> Tensor:
        """The log-probs of the rollout policy, in every step."""
        del evaluations
        return rollouts.rollout_log_probs

    def before_update(
        self,
        scored: ScoredBatch,
        evaluations: PolicyEvaluations,
        advantages: Tensor | None,
        current_version: int,
    ) -> None:
        """Nothing is corrected yet."""
        del scored, evaluations, advantages, current_version

    def during_update(self, policy_version: int, num_updates: int, ranks: OverRanks) -> MiniBatchCorrection:
        """Correct every micro-batch by its current log-probs."""
        compares = self.evaluates_proximal(policy_version + 1)
        return ActorCorrection(self.config, self.by_age, policy_version, num_updates, ranks, compares)


Corrector = InDriver | InActor


def corrector_of(config: RolloutCorrectionConfig, by_age: bool = False) -> Corrector:
    """Who corrects in a run. With ``by_age``, and with full diagnostics, the gap is measured by age of
    tokens, too."""
    kind = InDriver if config.mode == "decoupled" else InActor
    return kind(config, by_age or config.diagnostics == "full")


def _proximal(evaluations: PolicyEvaluations) -> Tensor:
    assert evaluations.proximal_log_probs is not None  # evaluates_proximal, in every step
    return evaluations.proximal_log_probs
