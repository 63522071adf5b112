"""The terms of the objective, and the inputs of the advantages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl_rc.algorithm.ppo.choices import (
    distillation_loss_name,
    mini_batch_loss_name,
    needs_statistics_first,
    policy_loss_name,
)
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.algorithms import POLICY_LOSSES, EstimatorOption, EstimatorSpec, LossSpec
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.rollout_correction import CorrectionMode, ScoreCenteringConfig
from verl_rc.config.run import RunConfig


@dataclass(frozen=True)
class PolicyPlan:
    """The actor's objective."""

    loss: str
    """Name of the policy loss that runs."""
    spec: LossSpec | None
    """The record of the loss. None for a loss of the user's own, which may read every field."""
    mode: CorrectionMode
    """The mode of rollout correction."""
    applies_weights: bool
    """Importance weights multiply the token losses."""
    rejects_tokens: bool
    """Rules of rejection can leave out tokens with finite log-probs."""
    centering: ScoreCenteringConfig | None
    """The loss of a token less what the sampler expects of it. None: the loss is not centered."""
    counted_tokens: Literal["original", "kept"]
    """Tokens that denominators count: all response tokens, or those that rejection kept."""
    aggregation: str
    """Average of the policy term."""
    regulariser_aggregation: str
    """Average of the entropy and KL terms."""
    entropy_coeff: float
    """Coefficient of the entropy; 0 means that entropy is only reported."""
    entropy_target: float | None
    """Entropy below which an adaptive coefficient acts, nats. None without one."""
    kl_loss_coef: float | None
    """Coefficient of the KL term. None without a KL term; 0 means that it is only reported."""
    distillation: DistillationLossConfig | None
    """The loss from a teacher's log-probs. None without a teacher."""
    teacher_loss: str | None
    """Name of the policy loss on the teacher's advantages. None if the divergence itself is differentiated,
    or there is no teacher."""
    statistics_passes: int
    """Passes without gradient over each mini-batch, before its update, for statistics that its loss needs."""

    @property
    def old_policy(self) -> Literal["proximal", "rollout"]:
        """The policy that the loss's ratio divides by."""
        return "rollout" if self.mode == "bypass" else "proximal"

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy is in the loss."""
        return self.entropy_coeff != 0 or self.entropy_target is not None

    @property
    def has_task_loss(self) -> bool:
        """Whether the task's rewards are trained on."""
        return self.distillation is None or self.distillation.use_task_rewards

    @property
    def aggregations(self) -> set[str]:
        """Averages of all terms in the loss."""
        has_regulariser = self.has_entropy or bool(self.kl_loss_coef) or self.distillation is not None
        policy_term = {self.aggregation} if self.has_task_loss else set()
        return policy_term | ({self.regulariser_aggregation} if has_regulariser else set())


def plan_policy(config: RunConfig) -> PolicyPlan:
    """The actor's objective under ``config``."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss = policy_loss_name(actor, correction)
    spec = POLICY_LOSSES.get(loss)
    distillation = config.distillation.loss
    return PolicyPlan(
        loss=loss,
        spec=spec,
        mode=correction.mode,
        applies_weights=correction.rollout_is is not None and correction.applies_weights,
        rejects_tokens=correction.rejects,
        centering=correction.score_centering if correction.score_centering.enabled else None,
        counted_tokens=correction.rejection_denominator,
        aggregation=(spec is not None and spec.aggregation) or actor.loss_agg_mode,
        regulariser_aggregation=actor.loss_agg_mode,
        entropy_coeff=actor.entropy_coeff,
        entropy_target=config.algorithm.adaptive_entropy.target_entropy,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
        distillation=distillation,
        teacher_loss=None if distillation is None else distillation_loss_name(distillation, correction),
        statistics_passes=int(correction.mode != "decoupled" and needs_statistics_first(correction))
        + int(mini_batch_loss_name(actor, correction) is not None),
    )


@dataclass(frozen=True)
class AdvantagePlan:
    """The computation of advantages."""

    estimator: str
    """Name of the estimator, with aliases resolved."""
    spec: EstimatorSpec | None
    """The record of the estimator. None for a function of the user's own, which may read every field."""
    uses_values: bool
    """The critic's values are subtracted."""
    excludes_rejected: bool
    """Fully rejected rows are excluded from the group's baseline."""
    reward_kl: bool
    """Advantages carry a KL penalty against the reference policy."""

    @property
    def compares_groups(self) -> bool:
        """Whether samples of one prompt are compared."""
        return self.spec is None or self.spec.compares_groups

    def reads(self, option: EstimatorOption) -> bool:
        """Whether an option of ``algorithm`` changes advantages."""
        return self.spec is None or option in self.spec.options


def plan_advantages(config: RunConfig) -> AdvantagePlan:
    """The computation of advantages under ``config``."""
    algorithm, spec = config.algorithm, config.algorithm.estimator
    return AdvantagePlan(
        estimator=algorithm.adv_estimator if spec is None or spec.same_as is None else spec.same_as,
        spec=spec,
        uses_values=config.needs_critic if spec is None else "values" in spec.inputs,
        excludes_rejected=algorithm.rollout_correction.rejected_in_group_baseline == "exclude",
        reward_kl=algorithm.use_kl_in_reward
        and algorithm.kl_ctrl.kl_coef != 0
        and not algorithm.estimator_reads("component_scores"),
    )


def inputs_of_update(policy: PolicyPlan, advantages: AdvantagePlan) -> Iterator[str]:
    """Fields of ``RolloutBatch``, ``PolicyEvaluations`` and ``ScoredBatch`` that the update reads."""
    spec = advantages.spec
    inputs = spec.inputs if policy.has_task_loss and spec is not None else ()
    yield "response_mask"
    if policy.has_task_loss:
        yield "component_scores" if "component_scores" in inputs else "scores"
        yield from (name for name in ("reward_baselines", "sum_pi_squared") if name in inputs)
        if advantages.compares_groups:
            yield "group_ids"
        if advantages.uses_values:
            yield "critic_values"
    teacher_reads_old = (
        policy.teacher_loss is not None and POLICY_LOSSES[policy.teacher_loss].reads_old_log_probs
    )
    task_reads_old = policy.spec is None or policy.spec.reads_old_log_probs or advantages.reward_kl
    reads_old = teacher_reads_old or (policy.has_task_loss and task_reads_old) or "old_log_probs" in inputs
    corrects = policy.applies_weights or policy.rejects_tokens
    if corrects or (policy.mode != "decoupled" and reads_old):
        yield "rollout_log_probs"
    if policy.mode == "decoupled" and (corrects or reads_old):
        yield "proximal_log_probs"
    if (policy.has_task_loss and advantages.reward_kl) or policy.kl_loss_coef:
        yield "reference_log_probs"
    if policy.distillation is not None:
        reads_top_tokens = policy.distillation.loss_mode == "forward_kl_topk"
        yield from (
            ("teacher_top_ids", "teacher_top_log_probs") if reads_top_tokens else ("teacher_log_probs",)
        )


def reference_meaning(config: RunConfig) -> str:
    """The reference policy in words."""
    reference = config.actor_rollout_ref.ref
    if not config.has_reference_model:
        return "the actor without its adapters"
    if config.refreshes_reference:
        return f"the actor of the last step that {reference.sync_freq} divides, first {reference.model_path}"
    return f"{reference.model_path}, frozen"


def mask_meaning(algorithm: AlgorithmConfig, policy: PolicyPlan) -> str:
    """The mask of the loss in words."""
    source = {
        "reject_sequence": "whose row's log-probs are finite",
        "reject_token": "whose log-probs are finite",
    }
    meaning = "1 on response tokens that rejection kept (loss_mask = response_mask and keep_mask)"
    if not policy.rejects_tokens:
        condition = source.get(algorithm.rollout_correction.nonfinite_logprob)
        meaning = "1 on response tokens (response_mask)" + (f" {condition}" if condition else "")
    truncated = ", of responses that a stop token ended" if algorithm.mask_truncated_responses else ""
    return meaning + truncated
