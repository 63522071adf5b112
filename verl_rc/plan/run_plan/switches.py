"""Options that another key turns off: of absent roles, disabled sections, and other devices."""

from collections.abc import Iterator, Sequence

from verl_rc.config.models import OptimConfig, torch_name
from verl_rc.config.profiler import ProfilerConfig
from verl_rc.config.run import EXPERIMENTS, RunConfig, TokenRecordsConfig

UnreadRule = tuple[bool, Sequence[str], str]
"""Whether the keys are unread, the keys (leaves, or sections as ``section.*``), and the reason."""

_ACTOR, _REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def unread_by_switches(config: RunConfig) -> Iterator[UnreadRule]:
    """Every rule, with complete keys."""
    yield from _roles(config)
    yield from _devices(config)
    yield from _micro_batches(config)
    yield from _schedules(config)
    yield from _data_and_rewards(config)
    yield from _rollouts(config)
    yield from _trainer(config)


def _keys(section: str, *names: str) -> list[str]:
    return [f"{section}.{name}" for name in names]


def _roles(config: RunConfig) -> Iterator[UnreadRule]:
    has_adapters, policy = config.actor_rollout_ref.model.lora_rank > 0, config.actor_rollout_ref
    yield (
        not config.needs_critic,
        ("critic.*",),
        f"no critic: algorithm.adv_estimator={config.algorithm.adv_estimator}",
    )
    taught, compared = config.distillation.enabled, config.needs_reference
    keys = _keys(_REFERENCE, "model_path" if taught else "*")
    yield not compared, keys, "nothing compares with the reference policy"
    yield (
        compared and has_adapters,
        _keys(_REFERENCE, "model_path", *(() if taught else ("fsdp_config.*",))),
        "with LoRA the reference is the actor without its adapters",
    )
    yield (
        not has_adapters,
        _keys(_MODEL, "lora_alpha", "target_modules", "exclude_modules", "lora.merge"),
        "lora_rank=0",
    )
    dtypes = {policy.rollout.dtype, policy.actor.fsdp_config.dtype, policy.ref.fsdp_config.dtype}
    yield (
        {torch_name(dtype) for dtype in dtypes} == {"float32"},
        _keys(_MODEL, "head_dtype"),
        "actor, reference and engines compute in float32 anyway",
    )


def _devices(config: RunConfig) -> Iterator[UnreadRule]:
    on_cpu, rollout = config.trainer.device == "cpu", config.actor_rollout_ref.rollout
    engine = ("gpu_memory_utilization", "free_cache_engine", "enforce_eager", "enable_chunked_prefill")
    yield on_cpu, _keys(_ROLLOUT, *engine), "trainer.device=cpu"
    yield (
        rollout.kv_cache_megabytes is not None and not on_cpu,
        _keys(_ROLLOUT, "gpu_memory_utilization"),
        "kv_cache_megabytes was given",
    )
    yield (
        not config.actor_rollout_ref.hybrid_engine and not on_cpu,
        _keys(_ROLLOUT, "free_cache_engine"),
        "actor_rollout_ref.hybrid_engine=False: engines share no GPU with the trainer",
    )
    yield (
        config.actor_rollout_ref.exact and not on_cpu,
        _keys(_ROLLOUT, "enforce_eager"),
        "actor_rollout_ref.exact=True captures no CUDA graph",
    )
    learners = (_ACTOR, "critic") if config.needs_critic else (_ACTOR,)
    for section in (*learners, *((_REFERENCE,) if config.frozen_policies else ())):
        fsdp = f"{section}.fsdp_config"
        offloads = _keys(fsdp, "param_offload", *(("optimizer_offload",) if section in learners else ()))
        yield on_cpu, offloads, "trainer.device=cpu: weights lie in host memory anyway"
        yield config.num_ranks == 1, _keys(fsdp, "fsdp_size"), "one rank holds all weights"
    yield on_cpu, _keys(_MODEL, "enable_activation_offload"), "trainer.device=cpu: all memory is the host's"
    yield config.num_ranks == 1, _keys("trainer", "balance_batch"), "one rank has all rows"
    gradient_sums = [f"{section}.fsdp_config.use_no_sync_for_gradient_accumulation" for section in learners]
    yield config.num_ranks == 1, gradient_sums, "one rank: its gradients are whole anyway"


def _micro_batches(config: RunConfig) -> Iterator[UnreadRule]:
    policy, scores = config.actor_rollout_ref, config.needs_reference or config.distillation.enabled
    limits = [
        (True, f"{_ACTOR}.ppo", policy.actor.use_dynamic_bsz),
        (config.needs_critic, "critic.ppo", config.critic.use_dynamic_bsz),
        (True, f"{_ROLLOUT}.log_prob", policy.rollout.log_prob_use_dynamic_bsz),
        (scores, f"{_REFERENCE}.log_prob", policy.ref.log_prob_use_dynamic_bsz),
    ]
    for limit, is_dynamic in ((limit, is_dynamic) for has_role, limit, is_dynamic in limits if has_role):
        switch = "use_dynamic_bsz" if limit.endswith("ppo") else "log_prob_use_dynamic_bsz"
        reason = f"{switch}={is_dynamic}: micro-batches are filled by"
        yield not is_dynamic, (f"{limit}_max_token_len_per_gpu",), f"{reason} rows"
        yield is_dynamic, (f"{limit}_micro_batch_size_per_gpu",), f"{reason} tokens"


def _schedules(config: RunConfig) -> Iterator[UnreadRule]:
    schedules: dict[str, OptimConfig] = {f"{_ACTOR}.optim": config.actor_rollout_ref.actor.optim}
    if config.needs_critic:
        schedules["critic.optim"] = config.critic.optim
    for section, optim in schedules.items():
        schedule = f"lr_scheduler_type={optim.lr_scheduler_type}"
        yield optim.lr_scheduler_type == "constant", _keys(section, "min_lr_ratio"), schedule
        yield optim.lr_scheduler_type != "cosine", _keys(section, "num_cycles"), schedule
        yield optim.lr_warmup_steps >= 0, _keys(section, "lr_warmup_steps_ratio"), "lr_warmup_steps was given"


def _data_and_rewards(config: RunConfig) -> Iterator[UnreadRule]:
    data, reward = config.data, config.reward
    yield (
        not data.shuffle and data.custom_cls.path is None,  # a class of the user's own may read the seed
        ("data.seed",),
        "shuffle=False: prompts are taken in the order of the files",
    )
    yield (
        data.filter_overlong_prompts,
        ("data.truncation",),
        "filter_overlong_prompts=True leaves nothing to cut",
    )
    yield (
        config.algorithm.adaptive_entropy.target_entropy is None,
        _keys("algorithm.adaptive_entropy", "max_ent_coef", "delta_ent_coef"),
        "target_entropy=null",
    )
    yield not config.algorithm.filter_groups.enable, ("algorithm.filter_groups.*",), "it is not enabled"
    yield (
        not reward.reward_kwargs.overlong_buffer_cfg.enable,
        ("reward.reward_kwargs.*",),
        "it is not enabled",
    )
    judge = reward.reward_model
    yield not judge.enable, ("reward.reward_model.*",), "it is not enabled"
    yield (
        judge.rollout.name is None,
        _keys("reward.reward_model.rollout", "tensor_model_parallel_size", "gpu_memory_utilization"),
        "rollout.name=null: transformers computes the reward model",
    )
    yield (
        judge.rollout.name is not None,
        _keys("reward.reward_model", "micro_batch_size_per_gpu"),
        "rollout.name=vllm: the engine batches by tokens",
    )
    yield (
        config.trainer.device == "cpu",
        _keys("reward.reward_model.rollout", "gpu_memory_utilization"),
        "trainer.device=cpu",
    )
    has_function = reward.custom_reward_function.path is not None
    yield (
        not has_function,
        _keys("reward.custom_reward_function", "name", "reward_kwargs"),
        "custom_reward_function.path=null: no function of your own",
    )
    processes = _keys("reward", "num_workers", "timeout_seconds")
    yield (
        reward.reward_model.enable and not has_function,
        processes,
        "the reward model's score is the reward: no function is called",
    )
    environment = config.actor_rollout_ref.rollout.environment
    scorers = _keys("reward", "custom_reward_function.*", "reward_model.*", "failure_score")
    yield (
        environment.name is not None and environment.reward == "turns",
        (*scorers, *processes),
        "environment.reward=turns: no reward function is called",
    )


def _rollouts(config: RunConfig) -> Iterator[UnreadRule]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    validation = rollout.val_kwargs
    yield not rollout.multi_turn.enable, _keys(_ROLLOUT, "multi_turn.*"), "it is not enabled"
    yield rollout.environment.name is None, _keys(_ROLLOUT, "environment.*"), "environment.name=null"
    yield (
        validation.is_greedy,
        _keys(f"{_ROLLOUT}.val_kwargs", "top_p", "top_k"),
        "validation is greedy (val_kwargs.do_sample, val_kwargs.temperature)",
    )
    yield (
        validation.do_sample is False,
        _keys(f"{_ROLLOUT}.val_kwargs", "temperature"),
        "val_kwargs.do_sample=False is greedy",
    )
    yield (
        not trainer.validates,
        (
            *_keys("trainer", "log_val_generations", "validation_data_dir"),
            *_keys("data", "val_batch_size", "val_max_samples"),
            f"{_ROLLOUT}.val_kwargs.*",
        ),
        "trainer.test_freq <= 0 and val_before_train=False: nothing is validated",
    )


def _trainer(config: RunConfig) -> Iterator[UnreadRule]:
    trainer, alerts = config.trainer, config.trainer.alerts
    yield (
        config.global_profiler.tool is None,
        _keys("global_profiler", *(name for name in ProfilerConfig.model_fields if name != "tool")),
        "global_profiler.tool=null",
    )
    yield (
        not trainer.token_records.enable,
        _keys(
            "trainer.token_records", *(name for name in TokenRecordsConfig.model_fields if name != "enable")
        ),
        "token_records.enable=False",
    )
    yield alerts.mismatch_limit is None, _keys("trainer.alerts", "mismatch"), "mismatch_limit=null: never"
    experiments = set(trainer.logger) & set(EXPERIMENTS)
    yield (
        not experiments or trainer.report != "at_end",
        _keys("trainer", "wandb_text"),
        "no report goes to W&B: it takes logger=wandb and report=at_end",
    )
    default_folder = f"checkpoints/{trainer.project_name}/{trainer.experiment_name}"
    yield (
        not experiments and trainer.default_local_dir != default_folder,
        _keys("trainer", "project_name", "experiment_name"),
        "logger has no tracker of runs, and default_local_dir was given",
    )
    alerts_save = "save_and_stop" in (alerts.mismatch, alerts.gap, alerts.cause, alerts.reward_collapse)
    yield (
        trainer.save_freq <= 0 and not alerts_save,
        ("trainer.max_actor_ckpt_to_keep", f"{_ACTOR}.checkpoint.*"),
        "trainer.save_freq <= 0: nothing is saved",
    )
    training_keys = (
        *("total_epochs", "total_training_steps", "critic_warmup", "test_freq", "save_freq"),
        *("val_before_train", "rollout_data_dir", "token_records.*"),
    )
    yield (
        trainer.val_only,
        (*_keys("trainer", *training_keys), "algorithm.*", "critic.*", f"{_ACTOR}.optim.*"),
        "trainer.val_only=True: nothing is trained",
    )
