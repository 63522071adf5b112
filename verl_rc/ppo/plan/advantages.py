"""What the advantages, the correction and so the whole step are computed from: which inputs of the driver matter."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl_rc.config.algorithm import GROUP_ESTIMATORS, TOKEN_BASELINE_ESTIMATORS
from verl_rc.config.run import RunConfig
from verl_rc.ppo.plan.objective import PolicyPlan

_WITH_STD = ("grpo", "grpo_passk")
_VECTORIZED = "_vectorized"


@dataclass(frozen=True)
class AdvantagePlan:
    """How advantages come about."""

    estimator: str
    """Its name, without verl's ``_vectorized``."""
    is_known: bool
    """False: a function of the user's own, which may look at everything."""
    compares_groups: bool
    """Samples of one prompt are compared."""
    uses_values: bool
    """The critic's values are subtracted."""
    uses_gamma: bool
    uses_lam: bool
    uses_std: bool
    """``norm_adv_by_std_in_grpo`` is read."""
    never_negative: bool
    """No advantage is below 0."""
    excludes_rejected: bool
    """Rows of which nothing is kept leave the group's baseline."""
    reward_kl: bool
    """Advantages carry a KL penalty against the reference policy."""
    inputs: tuple[str, ...]
    """Fields of ``RolloutBatch``, ``PolicyEvaluations`` and ``Samples`` that change the actor's update."""


def plan_advantages(config: RunConfig, policy: PolicyPlan) -> AdvantagePlan:
    """Advantages under ``config``, and everything the actor's update follows from."""
    algorithm = config.algorithm
    estimator = algorithm.adv_estimator.removesuffix(_VECTORIZED)
    is_known = ":" not in estimator
    plan = AdvantagePlan(
        estimator=estimator,
        is_known=is_known,
        compares_groups=not is_known or estimator in GROUP_ESTIMATORS,
        uses_values=estimator == "gae" or (not is_known and config.needs_critic),
        uses_gamma=not is_known or estimator in ("gae", "reinforce_plus_plus"),
        uses_lam=not is_known or estimator == "gae",
        uses_std=not is_known or estimator in _WITH_STD,
        never_negative=estimator == "grpo_passk",
        excludes_rejected=algorithm.rollout_correction.rejected_in_group_baseline == "exclude",
        reward_kl=algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0 and estimator != "gdpo",
        inputs=(),
    )
    return replace(plan, inputs=tuple(dict.fromkeys(_inputs(plan, policy))))


def _inputs(plan: AdvantagePlan, policy: PolicyPlan) -> Iterator[str]:
    yield "response_mask"
    yield "component_scores" if plan.estimator == "gdpo" else "scores"
    if plan.estimator == "remax":
        yield "reward_baselines"
    uses_distribution = plan.estimator in TOKEN_BASELINE_ESTIMATORS
    if uses_distribution:
        yield "sum_pi_squared"
    corrects = policy.weights or policy.rejects
    reads_old = policy.facts is None or policy.facts.reads_old_log_probs or plan.reward_kl or uses_distribution
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
