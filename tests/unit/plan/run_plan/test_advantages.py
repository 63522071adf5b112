"""The inputs that a plan names decide the actor's update, and no other column of the driver does."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from planned_runs import INPUTS, Given, Inputs, config_of, outcome, perturbed
from torch import Tensor

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, EstimatorOption
from verl_rc.config.run import RunConfig
from verl_rc.plan.run_plan.objective import inputs_of_update, plan_advantages, plan_policy

ALGORITHM, ACTOR = "algorithm", "actor_rollout_ref.actor"
CORRECTION = f"{ALGORITHM}.rollout_correction"
WEIGHTS: Given = {f"{CORRECTION}.rollout_is": "sequence"}
REWARD_KL: Given = {f"{ALGORITHM}.use_kl_in_reward": True, f"{ALGORITHM}.kl_ctrl.kl_coef": 0.5}
MODES: dict[str, Given] = {
    "decoupled": {},
    "weights": WEIGHTS,
    "rejection": {f"{CORRECTION}.rollout_rs": "seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold": 0.05},
    "no ratio": {f"{ACTOR}.policy_loss.loss_mode": "gpg"},
    "bypass": {f"{CORRECTION}.bypass_mode": True},
    "reinforce": {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"},
    "reinforce, weights": {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.loss_type": "reinforce",
        **WEIGHTS,
    },
}
MORE: dict[str, Given] = {
    "alone": {},
    "kl in reward": REWARD_KL,
    "kl in reward of weight 0": {**REWARD_KL, f"{ALGORITHM}.kl_ctrl.kl_coef": 0.0},
    "kl loss": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.5},
}
PARAMETERS: dict[str, Given] = {
    "gdpo": {f"{ALGORITHM}.gdpo_reward_keys": ["score", "acc"]},
}
TEACHER: Given = {
    "distillation.enabled": True,
    "distillation.teacher_models.teacher_model.model_path": "unused",
}
LOSS = "distillation.distillation_loss"
PG: Given = {**TEACHER, f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True}
TEACHERS: dict[str, Given] = {
    "beside the task": TEACHER,
    "alone": {**TEACHER, f"{LOSS}.use_task_rewards": False},
    "its likeliest tokens beside the task": {**TEACHER, f"{LOSS}.loss_mode": "forward_kl_topk"},
    "advantages beside the task": PG,
    "advantages alone": {**PG, f"{LOSS}.use_task_rewards": False},
}
BUILT = [name for name in ADVANTAGE_ESTIMATORS if name != "tir_optimal_token_baseline"]
"""The other one is refused."""
MATRIX: dict[str, Given] = {
    f"{estimator}; {mode}; {more}": {
        f"{ALGORITHM}.adv_estimator": estimator,
        **PARAMETERS.get(estimator, {}),
        **MODES[mode],
        **MORE[more],
    }
    for estimator in BUILT
    for mode in MODES
    for more in MORE
    if estimator in ("grpo", "gae") or (mode in ("weights", "no ratio") and more in ("alone", "kl in reward"))
}
MATRIX |= {
    f"a teacher, {use}; {mode}; {more}": {**TEACHERS[use], **MODES[mode], **MORE[more]}
    for use in TEACHERS
    for mode in MODES
    for more in ("alone", "kl in reward", "kl loss")
    if "alone" not in use or mode != "no ratio"  # which is the task's loss
}
ROLLOUT_FIELDS = ("response_mask", "rollout_log_probs", "policy_versions", "group_ids", "finished")
EVALUATION_FIELDS = (
    "proximal_log_probs",
    "entropies",
    "reference_log_probs",
    "critic_values",
    "sum_pi_squared",
    "varentropies",
    "teacher_log_probs",
    "teacher_top_ids",
    "teacher_top_log_probs",
)
SCORE_FIELDS = ("scores", "reward_baselines", "component_scores")
ALL_INPUTS = (*SCORE_FIELDS, *ROLLOUT_FIELDS, *EVALUATION_FIELDS)


def changed(name: str) -> Inputs:
    scored = INPUTS.scored
    if name in SCORE_FIELDS:
        return replace(INPUTS, scored=replace(scored, **{name: perturbed(getattr(scored, name))}))
    owner = (scored.rollouts if name in ROLLOUT_FIELDS else INPUTS.evaluations).clone()
    setattr(owner, name, other_values(name, getattr(owner, name)))
    if name in ROLLOUT_FIELDS:
        return replace(INPUTS, scored=replace(scored, rollouts=owner))
    return replace(INPUTS, evaluations=owner)


def other_values(name: str, values: Tensor) -> Tensor:
    """Other groups, a shorter first response, or other numbers."""
    if name == "group_ids":
        return values.roll(1)
    if name == "response_mask":
        mask = values.clone()
        mask[0, 2:] = False
        return mask
    return ~values if values.dtype == torch.bool else perturbed(values)


def inputs_of(config: RunConfig) -> set[str]:
    return set(inputs_of_update(plan_policy(config), plan_advantages(config)))


@pytest.mark.parametrize(
    "name",
    [
        name
        if name.endswith("; alone") or name.startswith("grpo;")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in MATRIX
    ],
)
def test_the_inputs_decide_the_update_and_nothing_else_does(name: str) -> None:
    config = config_of(MATRIX[name])
    expected = outcome(config)
    live = {field for field in ALL_INPUTS if outcome(config, changed(field)) != expected}
    assert live == inputs_of(config)


def test_of_an_estimator_of_the_users_own_everything_is_assumed() -> None:
    config = config_of({f"{ALGORITHM}.adv_estimator": "mine:advantages", f"{ALGORITHM}.gamma": 0.9})
    plan = plan_advantages(config)
    assert plan.spec is None
    assert plan.compares_groups
    assert all(plan.reads(option) for option in get_args(EstimatorOption))
