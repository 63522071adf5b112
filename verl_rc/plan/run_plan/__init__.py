"""The plan of a run derived from its configuration: objective, batch sizes, stages of a step, unused options.
Pure."""

from dataclasses import dataclass

from verl_rc.config.run import RunConfig
from verl_rc.plan.run_plan.objective import (
    AdvantagePlan,
    PolicyPlan,
    inputs_of_update,
    mask_meaning,
    plan_advantages,
    plan_policy,
    reference_meaning,
)
from verl_rc.plan.run_plan.options import UnusedOption, asynchrony_warnings, unused_options, warnings_of
from verl_rc.plan.run_plan.schedule import (
    BatchArithmetic,
    LongestRows,
    Phase,
    UpdateArithmetic,
    plan_arithmetic,
    plan_phases,
)

__all__ = [
    "AdvantagePlan",
    "BatchArithmetic",
    "LongestRows",
    "UnusedOption",
    "Phase",
    "Plan",
    "PolicyPlan",
    "UpdateArithmetic",
    "inputs_of_update",
    "mask_meaning",
    "plan_of",
    "reference_meaning",
]


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    policy: PolicyPlan
    advantages: AdvantagePlan
    sizes: BatchArithmetic
    phases: tuple[Phase, ...]
    unused: tuple[UnusedOption, ...]
    """Options without effect on training."""
    warnings: tuple[str, ...]
    """Warnings about combinations that are allowed but probably unintended."""


def plan_of(config: RunConfig) -> Plan:
    """The plan of a valid configuration; reads no file, starts nothing."""
    policy, sizes = plan_policy(config), plan_arithmetic(config)
    advantages = plan_advantages(config)
    return Plan(
        policy=policy,
        advantages=advantages,
        sizes=sizes,
        phases=tuple(plan_phases(config, policy, sizes)),
        unused=unused_options(config, policy, advantages),
        warnings=(*warnings_of(config, policy, sizes), *asynchrony_warnings(config)),
    )
