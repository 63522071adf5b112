"""The objective in symbols: one formula for each loss and each average."""

from verl_rc.config.algorithms import AGGREGATIONS
from verl_rc.config.run import RunConfig
from verl_rc.report.plan import PolicyPlan


def divisors_of(mode: str, counted: str, loss_scale_factor: int) -> str:
    """The divisors of an aggregation mode in words; ``counted`` names the tokens that count."""
    return AGGREGATIONS[mode].divisors.format(counted=counted, factor=loss_scale_factor)


def policy_formula(plan: PolicyPlan) -> str:
    """``L_policy`` of a plan."""
    weight = "w · " if plan.weights else ""
    if plan.spec is None:
        return f"{weight}the function {plan.loss}"
    if plan.spec.is_per_row:
        own_weight = "W · " if plan.weights else ""
        return f"1/S · Σ_rows {own_weight}[{plan.spec.formula}]"
    return AGGREGATIONS[plan.aggregation].average_of(f"{weight}[{plan.spec.formula}]")


def total_formula(plan: PolicyPlan, kl_loss_type: str) -> str:
    """``L``: the policy term and the regularisers that are in the loss."""
    terms, average = ["L = L_policy"], AGGREGATIONS[plan.regulariser_aggregation]
    if plan.entropy_coeff:
        sign = "−" if plan.entropy_coeff > 0 else "+"
        terms.append(f"{sign} {abs(plan.entropy_coeff):g} · {average.average_of('H(π)')}")
    if plan.kl_loss_coef:
        divergence = average.average_of(f"{kl_loss_type}(π, π_ref)")
        terms.append(f"+ {plan.kl_loss_coef:g} · {divergence}")
    return " ".join(terms)


def parameter_values(config: RunConfig, plan: PolicyPlan) -> str:
    """The numbers of the formula, each with its key."""
    options = () if plan.spec is None else plan.spec.options
    return ", ".join(option.in_words(config.actor_rollout_ref.actor) for option in options)
