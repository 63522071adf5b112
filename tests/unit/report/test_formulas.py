"""Every loss and every average has its formula, and formulas show what the plan found."""

import re

import pytest
from planned_runs import Given, config_of

from verl_rc.config.algorithms import AGGREGATIONS, LOSS_MODES
from verl_rc.report.formulas import divisors_of, parameter_values, policy_formula, total_formula
from verl_rc.report.plan import plan_of

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_letter_of_an_average_is_explained(mode: str) -> None:
    average = AGGREGATIONS[mode].average_of("l")
    assert "m l" in average
    for letter in re.findall(r"[NSFn]", average.replace("rows", "")):
        assert f"{letter} = " in divisors_of(mode, "tokens", 7)


@pytest.mark.parametrize("loss", LOSS_MODES)
def test_a_ratio_in_the_formula_is_a_ratio_in_the_plan(loss: str) -> None:
    given = {f"{ACTOR}.policy_loss.loss_mode": loss}
    if loss == "dro":
        given[f"{ACTOR}.policy_loss.dro_beta"] = 0.3
    config = config_of(given)
    plan = plan_of(config).policy
    formula = policy_formula(plan)
    assert plan.spec is not None
    assert bool(re.search(r"π_old|\b[rs]\b", formula)) == plan.spec.reads_old_log_probs
    detached = "sg[" in formula
    assert not detached or plan.spec.gradient_through == "log_prob"
    assert parameter_values(config, plan).count("=") == len(plan.spec.options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "L = L_policy"),
        ({f"{ACTOR}.entropy_coeff": 0.01}, "L = L_policy − 0.01 · 1/N · Σ m H(π)"),
        ({f"{ACTOR}.entropy_coeff": -0.01}, "L = L_policy + 0.01 · 1/N · Σ m H(π)"),
        ({f"{ACTOR}.use_kl_loss": True}, "L = L_policy + 0.001 · 1/N · Σ m low_var_kl(π, π_ref)"),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}, "L = L_policy"),
    ],
)
def test_terms_of_the_loss(given: Given, expected: str) -> None:
    config = config_of(given)
    assert total_formula(plan_of(config).policy, config.actor_rollout_ref.actor.kl_loss_type) == expected


def test_weights_appear_where_they_are_applied() -> None:
    correction = "algorithm.rollout_correction"
    weighted: Given = {f"{correction}.rollout_is": "token"}
    assert " w · [" in policy_formula(plan_of(config_of(weighted)).policy)
    assert " w · [" not in policy_formula(plan_of(config_of({})).policy)
    assert " w · [" not in policy_formula(plan_of(config_of({**weighted, f"{correction}.bypass_mode": True})).policy)
