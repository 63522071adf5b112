"""The objective in symbols: one formula for each loss and each average."""

from collections.abc import Callable

from verl_rc.config.run import RunConfig
from verl_rc.ppo.plan import PolicyPlan

TOKEN_LOSSES = {
    "vanilla": "max(−A r, −A clip(r, 1−ε_low, 1+ε_high)), and at most −A c where A < 0",
    "gspo": "max(−A s, −A clip(s, 1−ε_low, 1+ε_high))",
    "gpg": "−A log π(y)",
    "cispo": "−A sg[clip(r, 1−ε_low, 1+ε_high)] log π(y)",
    "geo_mean": "−Ā exp(mean over the row of d), d = log r, at most ε_high where A > 0 and at least −ε_low where A < 0",
    "sapo": "−A (4/τ) sigmoid(τ (r − 1))",
    "clip_cov": "max(−A r, −A clip(r, 1−ε_low, 1+ε_high)), and 0 for a drawn share of the tokens with cov_low < C < cov_high",
    "kl_cov": "−A r, plus κ |log π(y) − log π_old(y)| for the share of the tokens with the largest C",
    "dppo_tv": "−A sg[min(r, c)] log π(y), while π(y) − π_old(y) has not moved by more than ε_high up or ε_low down",
    "dppo_kl": "−A sg[min(r, c)] log π(y), while the binary KL of π_old(y) and π(y) is not above ε_high up or ε_low down",
    "dro": "−A log π(y) + β/2 (log π(y) − log π_old(y))²",
    "reinforce": "−A log π(y)",
}
"""ℓ of each policy loss; sg[…] is a constant of the gradient."""

_AVERAGES: dict[str, Callable[[str], str]] = {
    "token-mean": lambda inner: f"1/N · Σ m {inner}",
    "token-sum": lambda inner: f"Σ m {inner}",
    "seq-mean-token-sum": lambda inner: f"1/S · Σ m {inner}",
    "seq-mean-token-mean": lambda inner: f"1/S · Σ_rows (1/n · Σ_t m {inner})",
    "seq-mean-token-sum-norm": lambda inner: f"1/(S·F) · Σ m {inner}",
}


def average_of(mode: str, inner: str) -> str:
    """What becomes of a term ``inner`` of every token under an aggregation mode."""
    return _AVERAGES[mode](inner)


def divisors_of(mode: str, counted: str, loss_scale_factor: int) -> str:
    """The divisors of an aggregation mode in words; ``counted`` names the tokens that count."""
    rows = f"S = rows of the mini-batch, over all ranks, with at least one of these: {counted}"
    return {
        "token-mean": f"N = {counted} of the mini-batch, over all ranks",
        "token-sum": "divided by nothing",
        "seq-mean-token-sum": rows,
        "seq-mean-token-mean": f"n = {counted} of the row; {rows}",
        "seq-mean-token-sum-norm": f"F = {loss_scale_factor}; {rows}",
    }[mode]


def policy_formula(plan: PolicyPlan) -> str:
    """``L_policy`` of a plan."""
    weight = "w · " if plan.weights else ""
    if plan.facts is None:
        return f"{weight}the function {plan.loss}"
    if plan.loss == "geo_mean":
        own_weight = "W · " if plan.weights else ""
        return f"1/S · Σ_rows {own_weight}[{TOKEN_LOSSES[plan.loss]}]"
    return average_of(plan.aggregation, f"{weight}[{TOKEN_LOSSES[plan.loss]}]")


def total_formula(plan: PolicyPlan, kl_loss_type: str) -> str:
    """``L``: the policy term and the regularisers that are in the loss."""
    terms = ["L = L_policy"]
    if plan.entropy_coeff:
        sign = "−" if plan.entropy_coeff > 0 else "+"
        terms.append(f"{sign} {abs(plan.entropy_coeff):g} · {average_of(plan.regulariser_aggregation, 'H(π)')}")
    if plan.kl_loss_coef:
        divergence = average_of(plan.regulariser_aggregation, f"{kl_loss_type}(π, π_ref)")
        terms.append(f"+ {plan.kl_loss_coef:g} · {divergence}")
    return " ".join(terms)


def parameter_values(config: RunConfig, plan: PolicyPlan) -> str:
    """The numbers of the formula, each with its key."""
    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    values = {
        "clip_ratio_low": f"ε_low = {actor.clip_ratio_low:g} (clip_ratio_low)",
        "clip_ratio_high": f"ε_high = {actor.clip_ratio_high:g} (clip_ratio_high)",
        "clip_ratio_c": f"c = {actor.clip_ratio_c:g} (clip_ratio_c)",
        "tau_pos": f"τ = {actor.tau_pos:g} where A > 0 (tau_pos)",
        "tau_neg": f"τ = {actor.tau_neg:g} elsewhere (tau_neg)",
        "policy_loss.clip_cov_ratio": f"share {loss.clip_cov_ratio:g} (policy_loss.clip_cov_ratio)",
        "policy_loss.clip_cov_lb": f"cov_low = {loss.clip_cov_lb:g} (policy_loss.clip_cov_lb)",
        "policy_loss.clip_cov_ub": f"cov_high = {loss.clip_cov_ub:g} (policy_loss.clip_cov_ub)",
        "policy_loss.kl_cov_ratio": f"share {loss.kl_cov_ratio:g} (policy_loss.kl_cov_ratio)",
        "policy_loss.ppo_kl_coef": f"κ = {loss.ppo_kl_coef:g} (policy_loss.ppo_kl_coef)",
        "policy_loss.dro_beta": f"β = {loss.dro_beta} (policy_loss.dro_beta)",
    }
    return ", ".join(values[option] for option in (() if plan.facts is None else plan.facts.options))
