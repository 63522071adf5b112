"""What the advantages, the correction and so the whole step are computed from: which inputs of the driver matter."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl_rc.config.algorithms import EstimatorOption, EstimatorSpec
from verl_rc.config.run import RunConfig
from verl_rc.report.plan.objective import PolicyPlan


@dataclass(frozen=True)
class AdvantagePlan:
    """How advantages come about."""

    estimator: str
    """Its name; that of the estimator it is another name for."""
    spec: EstimatorSpec | None
    """None: a function of the user's own, which may look at everything."""
    uses_values: bool
    """The critic's values are subtracted."""
    excludes_rejected: bool
    """Rows of which nothing is kept leave the group's baseline."""
    reward_kl: bool
    """Advantages carry a KL penalty against the reference policy."""
    inputs: tuple[str, ...]
    """Fields of ``RolloutBatch``, ``PolicyEvaluations`` and ``ScoreDetails`` (and ``scores``) that change the actor's update."""

    @property
    def compares_groups(self) -> bool:
        """Whether samples of one prompt are compared."""
        return self.spec is None or self.spec.compares_groups

    def reads(self, option: EstimatorOption) -> bool:
        """Whether an option of ``algorithm`` changes advantages."""
        return self.spec is None or option in self.spec.options


def plan_advantages(config: RunConfig, policy: PolicyPlan) -> AdvantagePlan:
    """Advantages under ``config``, and everything the actor's update follows from."""
    algorithm, spec = config.algorithm, config.algorithm.estimator
    plan = AdvantagePlan(
        estimator=algorithm.adv_estimator if spec is None or spec.same_as is None else spec.same_as,
        spec=spec,
        uses_values=config.needs_critic if spec is None else "values" in spec.inputs,
        excludes_rejected=algorithm.rollout_correction.rejected_in_group_baseline == "exclude",
        reward_kl=algorithm.use_kl_in_reward
        and algorithm.kl_ctrl.kl_coef != 0
        and not algorithm.estimator_reads("component_scores"),
        inputs=(),
    )
    return replace(plan, inputs=tuple(dict.fromkeys(_inputs(plan, policy))))


def _inputs(plan: AdvantagePlan, policy: PolicyPlan) -> Iterator[str]:
    needed = () if plan.spec is None else plan.spec.inputs
    yield "response_mask"
    yield "component_scores" if "component_scores" in needed else "scores"
    if "reward_baselines" in needed:
        yield "reward_baselines"
    if "sum_pi_squared" in needed:
        yield "sum_pi_squared"
    corrects = policy.weights or policy.rejects
    reads_old = policy.spec is None or policy.spec.reads_old_log_probs or plan.reward_kl or "old_log_probs" in needed
    if corrects or (policy.bypass and reads_old):
        yield "rollout_log_probs"
    if not policy.bypass and (corrects or reads_old):
        yield "old_log_probs"
    if plan.compares_groups:
        yield "group_ids"
    if plan.uses_values:
        yield "critic_values"
    if plan.reward_kl or policy.kl_loss_coef:
        yield "ref_log_prob"
