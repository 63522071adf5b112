"""A key that another one turns off is refused beside it, or listed as set and without effect."""

import fnmatch

import pytest
from planned_runs import Given, config_of

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import default_at
from verl_rc.plan.run_plan import plan_of

ACTOR, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TEACHER = "distillation.teacher_models.teacher_model"
CORRECTION = "algorithm.rollout_correction"
WITH_REFERENCE: Given = {f"{ACTOR}.use_kl_loss": True}
WITH_CRITIC: Given = {"critic.enable": True}
WITH_TEACHER: Given = {"distillation.enabled": True, f"{TEACHER}.model_path": "org/teacher"}
NO_VALIDATION: Given = {"trainer.test_freq": -1, "trainer.val_before_train": False}
BY_TOKENS: Given = {f"{ACTOR}.use_dynamic_bsz": True}
IN_ORDER: Given = {"data.shuffle": False}
ON_GPUS: Given = {"trainer.device": "cuda"}
CONSOLE: Given = {"trainer.logger": ["console"], "trainer.default_local_dir": "/runs/one"}
GREEDY: Given = {f"{ROLLOUT}.val_kwargs.do_sample": False}
JUDGED: Given = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "org/judge"}
SERVER = "reward.reward_model.rollout"
BY_TURNS: Given = {f"{ROLLOUT}.environment.name": "games:Guess"}

TURNED_OFF: list[tuple[Given, Given]] = [
    (switches, {key: value})
    for switches, leaves in [
        ({"trainer.alerts.mismatch_limit": None}, {"trainer.alerts.mismatch": "save_and_stop"}),
        (
            {"trainer.token_records.enable": False},
            {
                "trainer.token_records.rows_per_step": 64,
                "trainer.token_records.freq": 3,
                "trainer.token_records.full_freq": 5,
                "trainer.token_records.max_megabytes": 7,
                "trainer.token_records.contents": "numbers_only",
            },
        ),
        (
            CONSOLE,
            {
                "trainer.wandb_text": True,
                "trainer.project_name": "mine",
                "trainer.experiment_name": "first",
            },
        ),
        ({"trainer.report": "never"}, {"trainer.wandb_text": True}),
        (
            {"trainer.save_freq": -1},
            {
                "trainer.max_actor_ckpt_to_keep": 2,
                f"{ACTOR}.checkpoint.async_save": True,
            },
        ),
        (
            NO_VALIDATION,
            {
                "trainer.log_val_generations": 4,
                "trainer.validation_data_dir": "/samples",
                "data.val_batch_size": 2,
                "data.val_max_samples": 3,
                f"{ROLLOUT}.val_kwargs.n": 2,
                f"{ROLLOUT}.val_kwargs.temperature": 0.5,
            },
        ),
        (
            {"trainer.val_only": True},
            {
                "trainer.test_freq": 3,
                "trainer.save_freq": 3,
                "trainer.val_before_train": False,
                "trainer.total_epochs": 2,
                "trainer.total_training_steps": 4,
                "trainer.critic_warmup": 1,
                "trainer.rollout_data_dir": "/samples",
                "trainer.token_records.freq": 3,
                f"{ACTOR}.optim.lr": 1e-3,
                "algorithm.gamma": 0.5,
            },
        ),
        ({"trainer.resume_mode": "auto"}, {"trainer.resume_from_path": "/global_step_1"}),
        (IN_ORDER, {"data.seed": 5}),
        ({"data.filter_overlong_prompts": True}, {"data.truncation": "left"}),
        (
            {"reward.custom_reward_function.path": None},
            {
                "reward.custom_reward_function.reward_kwargs": {"a": 1},
                "reward.custom_reward_function.name": "mine",
            },
        ),
        (
            JUDGED,
            {
                "reward.num_workers": 2,
                "reward.timeout_seconds": 5,
            },
        ),
        (
            {"reward.reward_model.enable": False},
            {"reward.reward_model.model_path": "org/judge", "reward.reward_model.max_length": 9},
        ),
        (
            JUDGED,
            {
                f"{SERVER}.tensor_model_parallel_size": 2,
                f"{SERVER}.gpu_memory_utilization": 0.8,
            },
        ),
        (
            {**JUDGED, f"{SERVER}.name": "vllm"},
            {"reward.reward_model.micro_batch_size_per_gpu": 2, f"{SERVER}.gpu_memory_utilization": 0.8},
        ),
        (
            {"reward.reward_kwargs.overlong_buffer_cfg.enable": False},
            {
                "reward.reward_kwargs.overlong_buffer_cfg.len": 4,
                "reward.reward_kwargs.overlong_buffer_cfg.log": True,
            },
        ),
        (
            BY_TURNS,
            {
                "reward.custom_reward_function.path": "mine.py",
                "reward.num_workers": 2,
                "reward.timeout_seconds": 5,
            },
        ),
        (
            {"algorithm.filter_groups.enable": False},
            {"algorithm.filter_groups.metric": "acc", "data.gen_batch_size": 20},
        ),
        (
            {"algorithm.use_kl_in_reward": False},
            {"algorithm.kl_penalty": "k2", "algorithm.kl_ctrl.kl_coef": 0.5},
        ),
        ({f"{ACTOR}.use_kl_loss": False}, {f"{ACTOR}.kl_loss_coef": 0.5, f"{REFERENCE}.model_path": "org/m"}),
        (
            {f"{CORRECTION}.rollout_is": None},
            {
                f"{CORRECTION}.rollout_is_threshold": 3.0,
                f"{CORRECTION}.rollout_is_batch_normalize": True,
            },
        ),
        (
            {f"{CORRECTION}.rollout_rs": None},
            {
                f"{CORRECTION}.rollout_rs_threshold": 3.0,
                f"{CORRECTION}.rollout_rs_target_acceptance": 0.9,
                f"{CORRECTION}.rejection_denominator": "kept",
                f"{CORRECTION}.rejected_in_group_baseline": "exclude",
            },
        ),
        ({f"{CORRECTION}.bypass_mode": False}, {f"{CORRECTION}.loss_type": "reinforce"}),
        ({"critic.enable": False}, {"critic.optim.lr": 1e-4, "critic.ppo_epochs": 3}),
        (
            {"distillation.enabled": False},
            {
                "distillation.teacher_models": {"one": {"model_path": "org/teacher"}},
                "distillation.distillation_loss.topk": 5,
            },
        ),
        ({f"{MODEL}.lora_rank": 0}, {f"{MODEL}.lora_alpha": 8, f"{MODEL}.lora.merge": False}),
        (
            {f"{ROLLOUT}.multi_turn.enable": False},
            {f"{ROLLOUT}.multi_turn.format": "tag", "algorithm.turn_credit": "turn"},
        ),
        ({f"{ROLLOUT}.environment.name": None}, {f"{ROLLOUT}.environment.max_turns": 3}),
        ({f"{ROLLOUT}.top_p": 1.0}, {f"{ROLLOUT}.max_support": 9}),
        (
            GREEDY,
            {
                f"{ROLLOUT}.val_kwargs.temperature": 0.7,
                f"{ROLLOUT}.val_kwargs.top_p": 0.9,
                f"{ROLLOUT}.val_kwargs.top_k": 20,
                f"{ROLLOUT}.val_kwargs.n": 2,
            },
        ),
        ({f"{ROLLOUT}.val_kwargs.temperature": 0.0}, {f"{ROLLOUT}.val_kwargs.top_p": 0.9}),
        (
            BY_TOKENS,
            {
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3,
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 3,
            },
        ),
        ({**BY_TOKENS, **WITH_REFERENCE}, {f"{REFERENCE}.log_prob_micro_batch_size_per_gpu": 3}),
        ({**BY_TOKENS, **WITH_CRITIC}, {"critic.ppo_micro_batch_size_per_gpu": 3}),
        ({**BY_TOKENS, **WITH_TEACHER}, {f"{REFERENCE}.log_prob_micro_batch_size_per_gpu": 3}),
        (
            {f"{ACTOR}.use_dynamic_bsz": False},
            {
                f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 64,
            },
        ),
        (WITH_CRITIC, {"critic.ppo_max_token_len_per_gpu": 64, "critic.optim.min_lr_ratio": 0.1}),
        ({**WITH_CRITIC, "critic.optim.lr_warmup_steps": 3}, {"critic.optim.lr_warmup_steps_ratio": 0.1}),
        (
            {f"{ACTOR}.optim.lr_scheduler_type": "constant"},
            {f"{ACTOR}.optim.min_lr_ratio": 0.1, f"{ACTOR}.optim.num_cycles": 1.0},
        ),
        (
            {"trainer.device": "cpu"},
            {
                f"{ROLLOUT}.enable_chunked_prefill": False,
                f"{ROLLOUT}.gpu_memory_utilization": 0.8,
                f"{ROLLOUT}.free_cache_engine": False,
                f"{ROLLOUT}.enforce_eager": True,
                f"{ACTOR}.fsdp_config.param_offload": True,
            },
        ),
        ({**ON_GPUS, f"{ROLLOUT}.kv_cache_megabytes": 64}, {f"{ROLLOUT}.gpu_memory_utilization": 0.8}),
        ({**ON_GPUS, "actor_rollout_ref.hybrid_engine": False}, {f"{ROLLOUT}.free_cache_engine": False}),
        ({**ON_GPUS, "actor_rollout_ref.exact": True}, {f"{ROLLOUT}.enforce_eager": True}),
        (
            {**ON_GPUS, **WITH_REFERENCE},
            {f"{REFERENCE}.fsdp_config.fsdp_size": 1},
        ),
        (
            {"async_training.staleness_threshold": 0.0},
            {
                "async_training.partial_rollout": False,
                "async_training.order": "ready",
                "async_training.max_token_age": 3,
                f"{ROLLOUT}.checkpoint_engine.stage_updates": True,
            },
        ),
        (
            {"ray_kwargs.ray_init.address": "auto"},
            {
                "ray_kwargs.ray_init.num_cpus": 4,
                "ray_kwargs.ray_init.num_gpus": 1,
                "ray_kwargs.ray_init.object_store_memory": 90_000_000,
            },
        ),
    ]
    for key, value in leaves.items()
]
"""What is switched off, or on, and a key that has no effect then."""

KEEP_THEIR_EFFECT: list[tuple[Given, str]] = [
    ({}, "data.seed"),
    ({**IN_ORDER, "data.custom_cls.path": "mine.py", "data.custom_cls.name": "Mine"}, "data.seed"),
    ({}, "trainer.token_records.freq"),
    ({"trainer.alerts.mismatch_limit": None}, "trainer.alerts.mismatch_limit"),
    ({}, "trainer.alerts.mismatch"),
    ({}, "trainer.wandb_text"),
    ({}, "trainer.project_name"),
    ({"trainer.logger": ["console"]}, "trainer.project_name"),
    ({"trainer.save_freq": -1, "trainer.alerts.gap": "save_and_stop"}, "trainer.max_actor_ckpt_to_keep"),
    ({**NO_VALIDATION, "trainer.test_freq": 5}, f"{ROLLOUT}.val_kwargs.n"),
    ({f"{ROLLOUT}.val_kwargs.temperature": 0.7}, f"{ROLLOUT}.val_kwargs.top_p"),
    ({"reward.custom_reward_function.path": "mine.py"}, "reward.custom_reward_function.reward_kwargs"),
    ({**JUDGED, "reward.custom_reward_function.path": "mine.py"}, "reward.num_workers"),
    ({**BY_TURNS, f"{ROLLOUT}.environment.reward": "sum"}, "reward.num_workers"),
    ({}, "reward.num_workers"),
    ({f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    ({f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}, f"{ACTOR}.ppo_max_token_len_per_gpu"),
    (
        {**BY_TOKENS, **WITH_CRITIC, "critic.use_dynamic_bsz": False},
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    ),
    (BY_TOKENS, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    ({}, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    (JUDGED, "reward.reward_model.micro_batch_size_per_gpu"),
    (
        {**ON_GPUS, **JUDGED, "reward.reward_model.n_gpus_per_node": 1, f"{SERVER}.name": "vllm"},
        f"{SERVER}.gpu_memory_utilization",
    ),
    (ON_GPUS, f"{ROLLOUT}.enable_chunked_prefill"),
    (ON_GPUS, f"{ROLLOUT}.gpu_memory_utilization"),
    (ON_GPUS, f"{ROLLOUT}.free_cache_engine"),
    (ON_GPUS, f"{ROLLOUT}.enforce_eager"),
]


def unused(given: Given, only_changed: bool) -> list[str]:
    """The keys that the plan lists, sections as patterns."""
    options = plan_of(config_of(given)).unused
    return [option.key for option in options if option.is_changed or not only_changed]


@pytest.mark.parametrize(
    ("switches", "leaf"),
    TURNED_OFF,
    ids=[f"{key} {list(given)}" for given, leaf in TURNED_OFF for key in leaf],
)
def test_a_key_that_is_turned_off_is_refused_or_listed(switches: Given, leaf: Given) -> None:
    ((key, value),) = leaf.items()
    assert value != default_at(RunConfig, key)
    config_of(switches)  # which is accepted without the key
    try:
        listed = unused({**switches, **leaf}, only_changed=True)
    except ValueError as error:
        listed = [key] if key.rpartition(".")[2] in str(error) else [str(error)]
    assert any(fnmatch.fnmatch(key, pattern) for pattern in listed), listed


@pytest.mark.parametrize(("given", "key"), KEEP_THEIR_EFFECT)
def test_a_key_that_acts_is_not_listed(given: Given, key: str) -> None:
    assert not any(fnmatch.fnmatch(key, pattern) for pattern in unused(given, only_changed=False))
