"""What a plan calls without effect has none, every other option of the objective has one, and each warning
names what it saw."""

from collections.abc import Iterator

import pytest
from planned_runs import Given, config_of, outcome

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.plan.run_plan import Plan, plan_of
from verl_rc.plan.run_plan.options import UnusedOption

ALGORITHM, ACTOR = "algorithm", "actor_rollout_ref.actor"
CORRECTION = f"{ALGORITHM}.rollout_correction"
TEACHER = "distillation.distillation_loss"
BYPASS: Given = {f"{CORRECTION}.bypass_mode": True}
TOKEN_WEIGHTS: Given = {f"{CORRECTION}.rollout_is": "token"}

ALTERNATIVES: dict[str, list[object]] = {
    f"{ACTOR}.clip_ratio": [0.05],
    f"{ACTOR}.clip_ratio_low": [0.05],
    f"{ACTOR}.clip_ratio_high": [0.05],
    f"{ACTOR}.clip_ratio_c": [1.1],
    f"{ACTOR}.tau_pos": [2.0],
    f"{ACTOR}.tau_neg": [2.0],
    f"{ACTOR}.policy_loss.clip_cov_ratio": [0.3],
    f"{ACTOR}.policy_loss.clip_cov_lb": [0.4],
    f"{ACTOR}.policy_loss.clip_cov_ub": [1.01],
    f"{ACTOR}.policy_loss.kl_cov_ratio": [0.3],
    f"{ACTOR}.policy_loss.ppo_kl_coef": [0.9],
    f"{ACTOR}.policy_loss.loss_mode": ["gpg", "vanilla"],
    f"{ACTOR}.loss_agg_mode": ["token-mean", "seq-mean-token-sum"],
    f"{ACTOR}.loss_scale_factor": [5],
    f"{ACTOR}.entropy_coeff": [0.7],
    f"{ACTOR}.use_kl_loss": [True, False],
    f"{ACTOR}.kl_loss_coef": [0.7],
    f"{ACTOR}.kl_loss_type": ["k2", "abs"],
    f"{ALGORITHM}.gamma": [0.6],
    f"{ALGORITHM}.lam": [0.6],
    f"{ALGORITHM}.norm_adv_by_std_in_grpo": [False],
    f"{ALGORITHM}.turn_credit": ["turn"],
    f"{ALGORITHM}.use_kl_in_reward": [True, False],
    f"{ALGORITHM}.kl_penalty": ["k2", "abs"],
    f"{ALGORITHM}.kl_ctrl.kl_coef": [0.7],
    f"{CORRECTION}.rollout_is": ["geometric"],
    f"{CORRECTION}.rollout_is_threshold": [1.1],
    f"{TEACHER}.loss_mode": ["k3", "abs"],
    f"{TEACHER}.topk": [2],
    f"{TEACHER}.log_prob_min_clamp": [-1.0],
    f"{TEACHER}.use_policy_gradient": [True, False],
    f"{TEACHER}.use_task_rewards": [True, False],
    f"{TEACHER}.distillation_loss_coef": [0.3],
    f"{TEACHER}.loss_max_clamp": [0.1],
    f"{TEACHER}.clip_ratio": [0.05],
    f"{TEACHER}.clip_ratio_low": [0.05],
    f"{TEACHER}.clip_ratio_high": [0.05],
}
"""Options of the objective, and values of which one differs from what a configuration has."""
WITH_TEACHER: Given = {
    "distillation.enabled": True,
    "distillation.teacher_models.teacher_model.model_path": "unused",
}
ALONE: Given = {**WITH_TEACHER, f"{TEACHER}.use_task_rewards": False}
PG: Given = {f"{TEACHER}.loss_mode": "k1", f"{TEACHER}.use_policy_gradient": True}
CASES: dict[str, Given] = {
    "teacher": WITH_TEACHER,
    "teacher, policy gradient": {**WITH_TEACHER, **PG},
    "teacher, policy gradient, clips given": {
        **WITH_TEACHER,
        **PG,
        f"{TEACHER}.clip_ratio_low": 0.1,
        f"{TEACHER}.clip_ratio_high": 0.3,
    },
    "teacher's likeliest tokens": {**WITH_TEACHER, f"{TEACHER}.loss_mode": "forward_kl_topk"},
    "teacher alone": ALONE,
    "teacher alone, policy gradient": {**ALONE, **PG},
    "teacher alone, reinforce": {
        **ALONE,
        **PG,
        **BYPASS,
        f"{CORRECTION}.loss_type": "reinforce",
        **TOKEN_WEIGHTS,
    },
    "vanilla": {},
    "vanilla, clips given": {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.3},
    "gspo": {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
    "gpg": {f"{ACTOR}.policy_loss.loss_mode": "gpg", f"{ACTOR}.clip_ratio": 0.3},
    "cispo": {f"{ACTOR}.policy_loss.loss_mode": "cispo"},
    "geo_mean": {f"{ACTOR}.policy_loss.loss_mode": "geo_mean"},
    "geo_mean with entropy": {f"{ACTOR}.policy_loss.loss_mode": "geo_mean", f"{ACTOR}.entropy_coeff": 0.1},
    "sapo": {f"{ACTOR}.policy_loss.loss_mode": "sapo"},
    "clip_cov": {
        f"{ACTOR}.policy_loss.loss_mode": "clip_cov",
        f"{ACTOR}.policy_loss.clip_cov_ratio": 0.1,
        f"{ACTOR}.policy_loss.clip_cov_lb": 0.1,
    },
    "kl_cov": {f"{ACTOR}.policy_loss.loss_mode": "kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio": 0.1},
    "dppo_tv": {f"{ACTOR}.policy_loss.loss_mode": "dppo_tv", **TOKEN_WEIGHTS},
    "dppo_kl": {f"{ACTOR}.policy_loss.loss_mode": "dppo_kl"},
    "dro": {f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.3},
    "constant divisor": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
    "kl loss": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.3},
    "kl loss of weight 0": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0},
    "kl in reward": {f"{ALGORITHM}.use_kl_in_reward": True, f"{ALGORITHM}.kl_ctrl.kl_coef": 0.3},
    "kl in reward of weight 0": {f"{ALGORITHM}.use_kl_in_reward": True, f"{ALGORITHM}.kl_ctrl.kl_coef": 0.0},
    "gae": {f"{ALGORITHM}.adv_estimator": "gae"},
    "rloo": {f"{ALGORITHM}.adv_estimator": "rloo"},
    "grpo_passk": {f"{ALGORITHM}.adv_estimator": "grpo_passk"},
    "grpo_passk with sapo": {
        f"{ALGORITHM}.adv_estimator": "grpo_passk",
        f"{ACTOR}.policy_loss.loss_mode": "sapo",
    },
    "grpo_passk with dppo": {
        f"{ALGORITHM}.adv_estimator": "grpo_passk",
        f"{ACTOR}.policy_loss.loss_mode": "dppo_tv",
    },
    "grpo_passk with cispo": {
        f"{ALGORITHM}.adv_estimator": "grpo_passk",
        f"{ACTOR}.policy_loss.loss_mode": "cispo",
    },
    "reinforce_plus_plus": {f"{ALGORITHM}.adv_estimator": "reinforce_plus_plus"},
    "remax": {f"{ALGORITHM}.adv_estimator": "remax"},
    "gdpo": {f"{ALGORITHM}.adv_estimator": "gdpo", f"{ALGORITHM}.gdpo_reward_keys": ["score", "acc"]},
    "optimal_token_baseline": {f"{ALGORITHM}.adv_estimator": "optimal_token_baseline"},
    "weights": TOKEN_WEIGHTS,
    "bypass": BYPASS,
    "bypass with weights": {**BYPASS, **TOKEN_WEIGHTS},
    "reinforce": {**BYPASS, f"{CORRECTION}.loss_type": "reinforce", **TOKEN_WEIGHTS},
    "reinforce with a loss": {
        **BYPASS,
        f"{CORRECTION}.loss_type": "reinforce",
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
    },
}


def others(config: RunConfig, given: Given, key: str) -> Iterator[RunConfig]:
    """Configurations that differ from ``config`` in ``key`` alone and are accepted."""
    for value in ALTERNATIVES[key]:
        try:
            other = config_of({**given, key: value})
        except ValueError:
            continue
        if other != config:
            yield other


def names_of(option: UnusedOption) -> set[str]:
    """The keys of ``ALTERNATIVES`` that an option stands for."""
    if option.key.endswith(".*"):
        return {key for key in ALTERNATIVES if key.startswith(option.key[:-1])}
    return {option.key}


@pytest.mark.parametrize("name", list(CASES))
def test_an_option_has_an_effect_or_is_listed(name: str) -> None:
    given = CASES[name]
    config = config_of(given)
    listed = set().union(*map(names_of, plan_of(config).unused))
    expected = outcome(config)
    for key in ALTERNATIVES:
        for other in others(config, given, key):
            is_same = outcome(other) == expected
            assert is_same == (key in listed), (
                f"{key}: {'the same' if is_same else 'another'} update, listed: {key in listed}"
            )


def test_keys_exist_and_are_listed_once() -> None:
    known = set(fields_of(RunConfig))
    for given in CASES.values():
        keys = [option.key for option in plan_of(config_of(given)).unused]
        assert len(keys) == len(set(keys))
        for key in keys:
            assert key in known or (
                key.endswith(".*") and any(leaf.startswith(key[:-1]) for leaf in known)
            ), key


def option(plan: Plan, key: str) -> UnusedOption:
    (found,) = [option for option in plan.unused if option.key == key]
    return found


def test_options_that_were_set_are_distinguished_from_defaults() -> None:
    plan = plan_of(config_of({f"{ALGORITHM}.lam": 0.95, "critic.optim.lr": 1e-4}))
    assert option(plan, f"{ALGORITHM}.lam").is_changed
    assert option(plan, "critic.*").is_changed
    assert not option(plan, f"{ALGORITHM}.gamma").is_changed
    assert not option(
        plan_of(config_of({})), "critic.*"
    ).is_changed  # values that follow the actor's are not the user's
    assert not option(plan_of(config_of({})), f"{ACTOR}.loss_scale_factor").is_changed


def test_reported_options_are_distinguished_from_unused_ones() -> None:
    plan = plan_of(config_of({**BYPASS, **TOKEN_WEIGHTS}))
    assert option(plan, f"{CORRECTION}.rollout_is").metrics_only
    assert not option(plan, f"{ALGORITHM}.lam").metrics_only


TWO_UPDATES: Given = {"actor_rollout_ref.actor.ppo_mini_batch_size": 5}
WARNED: dict[str, tuple[Given, str]] = {
    "warm-up without critic": (
        {"trainer.critic_warmup": 5, **TWO_UPDATES},
        "for 4 steps, and there is no critic",
    ),
    "warm-up of the whole run": (
        {
            f"{ALGORITHM}.adv_estimator": "gae",
            "trainer.critic_warmup": 9,
            "trainer.total_training_steps": 8,
            **TWO_UPDATES,
        },
        "the actor is never updated",
    ),
    "k1 as a loss": (
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "kl", **TWO_UPDATES},
        "does not depend on the reference policy",
    ),
    "nothing to compare with": (
        {f"{ALGORITHM}.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 1, **TWO_UPDATES},
        "its advantage is made of its own score, without a baseline, as in verl",
    ),
    "tokens shared between nodes": (
        {
            "trainer.nnodes": 2,
            "trainer.n_gpus_per_node": 1,
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2,
            **TWO_UPDATES,
        },
        "does not divide trainer.n_gpus_per_node=1",
    ),
    "one update": ({"actor_rollout_ref.actor.ppo_mini_batch_size": 10}, "the ratio is 1 up to rounding"),
    "updates without a clip": (
        {**BYPASS, f"{CORRECTION}.loss_type": "reinforce", **TOKEN_WEIGHTS, **TWO_UPDATES},
        "2 updates per step without a clip",
    ),
}


@pytest.mark.parametrize("name", list(WARNED))
def test_what_is_hardly_meant_is_said(name: str) -> None:
    given, text = WARNED[name]
    (warning,) = plan_of(config_of(given)).warnings
    assert text in warning


def test_a_usual_run_is_not_warned() -> None:
    assert plan_of(config_of(TWO_UPDATES)).warnings == ()
