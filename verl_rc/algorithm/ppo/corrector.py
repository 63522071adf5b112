"""Who corrects, as two values with the same methods.

``InDriver``: the driver corrects the proximal policy against the rollout policy, before the update (decoupled
mode). ``InActor``: the actor corrects the current policy (bypass mode), or a proximal policy interpolated
from rollout and current policy, mini-batch by mini-batch during the update. ``config.mode`` names the three.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from verl_rc.algorithm.ppo.in_actor import (
    ActorCorrection,
    Corrected,
    MiniBatchCorrection,
    OverRanks,
)
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionResult, SequenceContext, correct_rows
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch
from verl_rc.records.ragged import Ragged
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.tensor_ops.masked import group_numbers

_STEPS_BETWEEN_COMPARISONS = 50


@dataclass(frozen=True)
class InDriver:
    """The driver corrects, before the update."""

    config: RolloutCorrectionConfig
    """With the threshold of the step."""
    by_age: bool = False
    """The gap is measured by age of tokens, too."""
    by_turn: bool = False
    """With full diagnostics the gap is measured by turn, too."""

    def evaluates_proximal(self, step: int) -> bool:
        """Whether log-probs of the proximal policy are computed before the updates of ``step``."""
        del step
        return True

    def log_probs_for_rewards(
        self, rollouts: Ragged[RolloutBatch], evaluations: Ragged[PolicyEvaluations]
    ) -> Tensor:
        """float32 ``[N]``: log-probs of the policy before the update, for rewards and baselines."""
        del rollouts
        return _proximal(evaluations)

    def before_update(
        self,
        scored: ScoredBatch,
        evaluations: Ragged[PolicyEvaluations],
        advantages: Tensor | None,
        current_version: int,
    ) -> CorrectionResult | None:
        """Correct the batch; None where the actor corrects. ``current_version`` is that of the proximal
        policy, from which ages of tokens count."""
        rollouts = scored.rollouts
        context = SequenceContext(
            group_slots=group_numbers(rollouts.group_ids, rollouts.group_ids.device),
            policy_versions=rollouts.policy_versions if self.by_age else None,
            current_version=current_version,
            advantages=advantages,
            scores=scored.scores,
            entropies=evaluations.entropies,
            sum_pi_squared=evaluations.sum_pi_squared,
            varentropies=evaluations.varentropies,
            engines=rollouts.engines,
            by_turn=self.by_turn,
        )
        return correct_rows(rollouts, self.config, _proximal(evaluations), context)

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
    by_age: bool = False
    """The gap is measured by age of tokens, too."""
    by_turn: bool = False
    """With full diagnostics the gap is measured by turn, too."""

    def evaluates_proximal(self, step: int) -> bool:
        """True where the proximal policy is interpolated, in every 50th step, for a comparison."""
        return self.config.proximal == "interpolate" and step % _STEPS_BETWEEN_COMPARISONS == 0

    def log_probs_for_rewards(
        self, rollouts: Ragged[RolloutBatch], evaluations: Ragged[PolicyEvaluations]
    ) -> Tensor:
        """The log-probs of the rollout policy, in every step."""
        del evaluations
        return cast(Tensor, rollouts.rollout_log_probs)

    def before_update(
        self,
        scored: ScoredBatch,
        evaluations: Ragged[PolicyEvaluations],
        advantages: Tensor | None,
        current_version: int,
    ) -> None:
        """Nothing is corrected yet."""
        del scored, evaluations, advantages, current_version

    def during_update(self, policy_version: int, num_updates: int, ranks: OverRanks) -> MiniBatchCorrection:
        """Correct every micro-batch by its current log-probs."""
        compares = self.evaluates_proximal(policy_version + 1)
        return ActorCorrection(
            self.config, self.by_age, self.by_turn, policy_version, num_updates, ranks, compares
        )


Corrector = InDriver | InActor


def corrector_of(config: RolloutCorrectionConfig, by_age: bool = False, by_turn: bool = False) -> Corrector:
    """Who corrects in a run. The gap is measured by age of tokens where they have several, and by turn where
    there are several."""
    return (InDriver if config.mode == "decoupled" else InActor)(config, by_age, by_turn)


def _proximal(evaluations: Ragged[PolicyEvaluations]) -> Tensor:
    log_probs: Tensor | None = evaluations.proximal_log_probs
    assert log_probs is not None  # evaluates_proximal, in every step
    return log_probs
