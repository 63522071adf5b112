"""Keys of verl that this schema lacks: the reason for refusing them, and values accepted because they match
the behaviour here.

verl's recipes write out many defaults. A key below may therefore be given with one of its accepted values and
is then dropped. Any other value refuses the run with the reason, which says what to write instead.
"""

from dataclasses import replace

from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.task import RewardEngineConfig
from verl_rc.config.verl.refused_leaves import (
    EITHER,
    FSDP_LEAVES,
    GLOBAL_BATCH,
    IMAGES,
    LORA_LEAVES,
    MEGATRON_LORA,
    MEGATRON_LORA_LEAVES,
    MODEL_LEAVES,
    MTP,
    NOTHING,
    OFF,
    PROFILER,
    PROFILER_LEAVES,
    QAT,
    WORKER_LEAVES,
    Refusal,
)

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"


_ROLLOUT_LEAVES = {
    "mode": Refusal(
        "asynchronous runs are made by async_training.staleness_threshold; drop it", ("sync", "async")
    ),
    "calculate_log_probs": Refusal(
        "it must be True, rollout correction and the proof of every weight update need the engine's "
        "log-probs; drop the override",
        (True,),
    ),
    "engine_kwargs.sglang": Refusal(
        "SGLang is not supported; write engine_kwargs.vllm.* for arguments of vLLM", NOTHING
    ),
    "engine_kwargs.trtllm": Refusal(
        "TensorRT-LLM is not supported; write engine_kwargs.vllm.* for arguments of vLLM", NOTHING
    ),
    "full_determinism": FSDP_LEAVES["full_determinism"],
    "cudagraph_capture_sizes": Refusal(
        "it is an argument of vLLM; write engine_kwargs.vllm.compilation_config", NOTHING
    ),
    "data_parallel_size": Refusal(
        "there are devices / tensor_model_parallel_size engines, replicas all; write 1", (1,)
    ),
    "expert_parallel_size": Refusal("expert parallelism is not built; write 1", (1,)),
    "pipeline_model_parallel_size": Refusal(
        "pipelines are not built; write 1, and raise tensor_model_parallel_size", (1,)
    ),
    "logprobs_mode": Refusal(
        "correction needs the log-probs of the distribution that is sampled from; write processed_logprobs",
        ("processed_logprobs",),
    ),
    "scheduling_policy": Refusal("requests are served in the order they come; write fcfs", ("fcfs",)),
    "layered_summon": Refusal("weights always travel in pieces; drop it", EITHER),
    "log_prob_micro_batch_size": Refusal(
        GLOBAL_BATCH.format(section=_ROLLOUT, key="log_prob_micro_batch_size"), (None,)
    ),
    "disable_log_stats": Refusal(
        "engines do not log; their metrics are rollout/* and timing_s/gen, so drop it", (True,)
    ),
    "do_sample": Refusal("training always samples; write rollout.temperature", (True,)),
    "repetition_penalty": Refusal(
        "it would change the distribution that is sampled from; write 1.0", (1, 1.0, None)
    ),
    "val_kwargs.repetition_penalty": Refusal("it is not built; write 1.0", (1, 1.0, None)),
    "over_sample_rate": Refusal("a step waits for all its samples; write 0", (0, 0.0)),
    "multi_stage_wake_up": Refusal(
        "an engine that shares a GPU always wakes in two stages, weights first; drop it", EITHER
    ),
    "use_rollout_log_probs": Refusal(
        "algorithm.rollout_correction.bypass_mode decides it; write that", (None,)
    ),
    "router_config_path": Refusal("the driver shares requests out to the engines; drop it", NOTHING),
    "agent.num_workers": Refusal(
        "one loop drives all engines, and there is no environment to give processes to; drop it", (8, None)
    ),
    "agent": Refusal(
        "one loop drives all engines; write rollout.environment.name=module:Class for what answers a turn, "
        "and let a loop that drives an engine itself call the chat endpoint as an agent",
        NOTHING,
    ),
    "multi_turn.tool_env_manifest_path": Refusal(
        "write all tools into multi_turn.tool_config_path; a row chooses by extra_info.tool_selection",
        NOTHING,
    ),
    "multi_turn.use_inference_chat_template": Refusal(
        "sampled tokens are never made from text again; drop it", OFF
    ),
    "multi_turn.tokenization_sanity_check_mode": Refusal(
        "sampled tokens are never made from text again; drop it", ("strict", "disable", "ignore_strippable")
    ),
    "multi_turn.num_repeat_rollouts": Refusal("write rollout.n, samples per prompt", (None,)),
    "multi_turn.completion_callback": Refusal("write multi_turn.tools=[module:attribute]", NOTHING),
    "checkpoint_engine.engine_kwargs": Refusal("write checkpoint_engine.backend", NOTHING),
    "checkpoint_engine.custom_backend_module": Refusal("write checkpoint_engine.backend=auto", NOTHING),
    "trace": Refusal(
        "no service is called; write trainer.rollout_data_dir=<folder>, for every sample", (*OFF, {})
    ),
    "skip_tokenizer_init": Refusal("prompts and responses travel as tokens; write True", (True,)),
    "moe_load_balance_metrics_interval": Refusal("it is not built; write 0", (0,)),
    "prometheus": Refusal("metrics go where trainer.logger says; write enable=False", OFF, switch="enable"),
    "quantization_config_file": Refusal("write rollout.quantization=<method>", NOTHING),
    "mtp": Refusal(MTP, OFF, switch="enable"),
    "qat": Refusal(QAT, (*OFF, {}), switch="enable"),
    "disaggregation": Refusal(
        "prefill and decoding share an engine; write enabled=False", OFF, switch="enabled"
    ),
    "standalone_gpu_memory_utilization": Refusal(
        "engines never move to the trainer's devices; write gpu_memory_utilization", (None,)
    ),
    "enable_sleep_mode": Refusal("write rollout.free_cache_engine", ()),
}
"""Leaves of ``actor_rollout_ref.rollout``."""

_DATA_LEAVES = {
    "tokenizer": Refusal("the tokenizer is that of actor_rollout_ref.model.path; drop it", NOTHING),
    "use_shm": Refusal("files are read where they lie; drop it", EITHER),
    "reward_fn_key": Refusal(
        "the column that chooses a reward function is data_source; rename yours", ("data_source",)
    ),
    "return_raw_chat": Refusal("prompts always travel as chat messages; drop it", EITHER),
    "return_raw_input_ids": Refusal("prompts always travel as chat messages; drop it", OFF),
    "return_full_prompt": Refusal(
        "samples and their prompts are in trainer.rollout_data_dir; write that", OFF
    ),
    "video_key": Refusal(IMAGES, ("videos", None)),
    "audio_key": Refusal(IMAGES, ("audios", None)),
    "image_patch_size": Refusal("the model's own image processor knows it; drop it", (14, 16, None)),
    "return_multi_modal_inputs": Refusal("pictures travel as encoded bytes, always; drop it", EITHER),
    "validation_shuffle": Refusal("validation takes its prompts in the order of the files; write False", OFF),
    "filter_overlong_prompts_workers": Refusal(
        "prompts are measured in the driver; write 1, or drop it", (1, None)
    ),
    "sampler": Refusal(
        "a sampler of one's own is not built; write data.custom_cls, whose rows come in its own order with "
        "data.shuffle=False",
        NOTHING,
    ),
    "datagen": Refusal("data are read once, at start; write data.custom_cls", NOTHING),
    "cache_dir": Refusal("files are read where they lie; drop it", ("~/.cache/verl/rlhf", *NOTHING)),
    "chat_template_func": Refusal(
        "the tokenizer's own template is used; write it into tokenizer_config.json, and its arguments as "
        "data.apply_chat_template_kwargs",
        NOTHING,
    ),
    "filter_prompts": Refusal(
        "data.filter_overlong_prompts decides about long prompts; write that", (True, None)
    ),
    "need_tools_kwargs": Refusal(
        "a tool gets what its row has in extra_info.tools_kwargs, and says itself what is missing; drop it",
        OFF,
    ),
}
"""Leaves of ``data``."""

_TRAINER_LEAVES = {
    "balance_keep_minibatch": Refusal(
        "the rows of a mini-batch never leave it; drop it, and write balance_batch", EITHER
    ),
    "esi_redundant_time": Refusal("it belongs to a service that is not supported; write 0", (0,)),
    "checkpoint_callback_class": Refusal(
        "checkpoints are folders under trainer.default_local_dir; drop it", NOTHING
    ),
    "default_hdfs_dir": Refusal(
        "there is no copy to HDFS; write trainer.default_local_dir=<a mounted path>", NOTHING
    ),
    "del_local_ckpt_after_load": Refusal("checkpoints are kept; write trainer.max_actor_ckpt_to_keep", OFF),
    "remove_previous_ckpt_in_save": Refusal("write trainer.max_actor_ckpt_to_keep=1", OFF),
    "ray_wait_register_center_timeout": Refusal("write trainer.ready_timeout_seconds", (300,)),
    "use_v1": Refusal("there is one trainer; drop it", EITHER),
    "use_legacy_worker_impl": Refusal("there is one kind of worker; drop it", ("auto", "enable", "disable")),
    "v1.trainer_mode": Refusal(
        "engines that share the trainer's devices take turns with it; write sync, or separate_async with "
        "actor_rollout_ref.hybrid_engine=False",
        ("sync", *NOTHING),
    ),
    "v1.sync": Refusal("the synchronous run has no further options; drop it", NOTHING),
    "v1.colocate_async": Refusal(
        "engines that share the trainer's devices take turns with it; write separate_async", (1, *NOTHING)
    ),
    "v1.separate_async.hybrid_rollout": Refusal(
        "the trainer's devices never sample; write False", OFF, switch="enable_switch"
    ),
    "v1.sampler.sync_refill_failed_groups": Refusal("failed groups are always replaced; drop it", EITHER),
    "v1.sampler.custom_sampler": Refusal(
        "a sampler of one's own is not built; write async_training.order", NOTHING
    ),
    "v1.sampler.sampler_kwargs": Refusal(
        "a sampler of one's own is not built; write async_training.order", NOTHING
    ),
    "npu_profile": Refusal(PROFILER, NOTHING),
    "profile_steps": Refusal(PROFILER, NOTHING),
    "worker_nsight_options": Refusal(PROFILER, NOTHING),
    "controller_nsight_options": Refusal(PROFILER, NOTHING),
}

_MOVED_TO_REWARD = (
    "it moved; write reward.reward_model.enable and .model_path for a reward model, reward.reward_kwargs.* "
    "for the overlong penalty, reward.custom_reward_function.* for a function of your own"
)
_OF_A_POOL = "the teacher is sharded over the trainer's ranks, as the reference policy is; drop it"
_NO_TAIL = "it belongs to forward_kl_topk_tail and eopd, which are not built; drop it"
_DISTILLATION_LEAVES = {
    **dict.fromkeys(("n_gpus_per_node", "nnodes", "enable_resource_pool", "num_workers"), _OF_A_POOL),
    "teacher_models.teacher_model.num_replicas": _OF_A_POOL,
    "teacher_models.teacher_model.nitrobrew_d_comp": "nitrobrew is not built; drop it",
    "teacher_models.teacher_model.inference": "no engine serves the teacher, the trainer's ranks score with "
    "it; write actor_rollout_ref.ref.fsdp_config.dtype and .log_prob_max_token_len_per_gpu, or drop it",
    **{
        f"teacher_models.teacher_model.{leaf}": f"the reference's holds for both; write {_REF}.{leaf}"
        for leaf in (
            *("fsdp_config", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
            "log_prob_micro_batch_size_per_gpu",
        )
    },
    **dict.fromkeys((f"distillation_loss.{name}" for name in ("kd_temperature", "tail_mass_eps")), _NO_TAIL),
}
"""Leaves of ``distillation``, while it is enabled."""

_SERVER = "reward.reward_model.rollout"
_SERVED = Refusal(
    f"a reward model's engine takes {_SERVER}.name, .tensor_model_parallel_size, .gpu_memory_utilization and "
    "reward.reward_model.dtype and .max_length; drop it"
)
_SERVER_LEAVES = {
    **dict.fromkeys(
        sorted({*RolloutConfig.model_fields, *_ROLLOUT_LEAVES, "seed"} - {*RewardEngineConfig.model_fields}),
        _SERVED,
    ),
    "skip_tokenizer_init": Refusal("vLLM's pooling needs the tokenizer; write False", (False,)),
    "enforce_eager": Refusal("a reward model's engine runs eagerly; write True", (True,)),
    "free_cache_engine": Refusal("its GPUs are its own, and it never sleeps; write False", (False,)),
}
"""Leaves of ``reward.reward_model.rollout``, while the reward model is enabled."""

_OTHER_LEAVES = {
    "distillation.teacher_key": Refusal("a teacher gets rows by data_source; drop it", ("data_source",)),
    "reward_model": Refusal(_MOVED_TO_REWARD, (None, False)),
    "reward_model.reward_manager": Refusal("it moved, and some releases of verl never read it here", (None,)),
    "reward_model.overlong_buffer": Refusal(
        "it moved, and some releases of verl never read it here", (None,)
    ),
    "reward_model.reward_kwargs": Refusal("it moved, and some releases of verl never read it here", (None,)),
    "custom_reward_function": Refusal("it moved, and some releases of verl never read it here", (None,)),
    "sandbox_fusion": Refusal(
        "no service is called; write a reward.custom_reward_function that calls it", (None,)
    ),
    "reward.sandbox_fusion": Refusal(
        "no service is called; write a reward.custom_reward_function that calls it", (None, 64, 1024)
    ),
    "reward.reward_manager": Refusal(
        "a manager of one's own is not built; write reward.custom_reward_function",
        ("register", None, "custom_reward_manager"),
    ),
    **{
        f"reward.{leaf}": Refusal(
            "calls are not counted per minute; limit them in your function, and write reward.num_workers and "
            "reward.max_concurrent for their number at a time",
            (None,),
        )
        for leaf in ("max_rpm", "max_tpm", "estimated_tokens_per_request")
    },
    "reward.reward_model.enable_resource_pool": Refusal("write reward.reward_model.n_gpus_per_node", OFF),
    "reward.reward_model.nnodes": Refusal("the reward model is one process; drop it", (0,)),
    "reward.reward_kwargs.overlong_buffer": Refusal(
        "write reward.reward_kwargs.overlong_buffer_cfg", (None,)
    ),
    "algorithm.use_pf_ppo": Refusal("it is not built; write False", OFF),
    "algorithm.pf_ppo": Refusal("it is not built; drop it", switch="algorithm.use_pf_ppo"),
    "algorithm.filter_groups.max_inflight_gen_batches": Refusal(
        "batches are drawn one after the other; drop it, and write max_num_gen_batches for a limit of "
        "batches per step",
        (1, None),
    ),
    f"{_REF}.fsdp_config.use_no_sync_for_gradient_accumulation": Refusal(
        "a reference has no gradients; drop it", EITHER
    ),
    f"{_REF}.checkpoint.async_save": Refusal("a reference never changes and is not saved; drop it", EITHER),
    f"{_ACTOR}.calculate_entropy": Refusal(
        "entropy is always measured, before the first update or, where the actor corrects, during the "
        "updates; drop it",
        EITHER,
    ),
    f"{_ACTOR}.calculate_sum_pi_squared": Refusal(
        "it is computed whenever algorithm.adv_estimator needs it; drop it", EITHER
    ),
    f"{_ACTOR}.use_fused_kernels": MODEL_LEAVES["use_fused_kernels"],
    **{
        f"{role}.router_replay.{name}": Refusal(
            "experts travel with the samples they belong to; drop it", (None,)
        )
        for role in (_ACTOR, _REF)
        for name in ("record_file", "replay_file")
    },
    f"{_REF}.router_replay.mode": Refusal(
        "the reference chooses its experts itself; write disabled", ("disabled", None)
    ),
    f"{_MODEL}.target_parameters": Refusal(
        "adapters belong to linear layers, not to bare parameters; write target_modules", NOTHING
    ),
    f"{_ACTOR}.ppo_micro_batch_size": Refusal(
        GLOBAL_BATCH.format(section=_ACTOR, key="ppo_micro_batch_size"), (None,)
    ),
    f"{_REF}.log_prob_micro_batch_size": Refusal(
        GLOBAL_BATCH.format(section=_REF, key="log_prob_micro_batch_size"), (None,)
    ),
    "critic.ppo_micro_batch_size": Refusal(
        GLOBAL_BATCH.format(section="critic", key="ppo_micro_batch_size"), (None,)
    ),
    "critic.forward_micro_batch_size": Refusal(
        "it counts rows of all ranks; write critic.ppo_micro_batch_size_per_gpu", (None,)
    ),
    "critic.forward_micro_batch_size_per_gpu": Refusal(
        "values are computed in the micro-batches of the update", (None,)
    ),
    "critic.forward_max_token_len_per_gpu": Refusal(
        "values are computed in the micro-batches of the update", (None,)
    ),
    "critic.loss_scale_factor": Refusal(
        "the critic's loss is divided by data.max_response_length; drop it", (None,)
    ),
    "critic.model.lora_rank": Refusal("a critic trains all its parameters; write 0", (0,)),
    "critic.model.lora_alpha": Refusal("a critic trains all its parameters; drop it", (16,)),
    "critic.model.lora.merge": Refusal("a critic trains all its parameters; drop it", EITHER),
    "critic.model.target_modules": Refusal("a critic trains all its parameters; drop it", ("all-linear",)),
    "critic.model.lora_adapter_path": Refusal("a critic trains all its parameters; drop it", (None,)),
    "critic.model.exclude_modules": Refusal("a critic trains all its parameters; drop it", (None,)),
    "actor_rollout_ref.nccl_timeout": Refusal(
        "collectives wait for 600 seconds; write trainer.ready_timeout_seconds for the start", (600,)
    ),
    "ray_kwargs.timeline_json_file": Refusal("it is not built; drop it", NOTHING),
    "ray_kwargs.ray_init.runtime_env.nsight": Refusal(PROFILER, NOTHING),
    "transfer_queue": Refusal(
        "there is no separate data plane here; write enable=False", OFF, switch="enable"
    ),
    "global_profiler.global_tool_config": Refusal(
        "it belongs to other profilers than torch's; drop it", switch="global_profiler.tool"
    ),
    **{
        f"global_profiler.{leaf}": PROFILER_LEAVES[leaf]
        for leaf in ("relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks")
    },
    "model_engine": Refusal(
        "Megatron, VeOmni, TorchTitan and the like are not supported; write dp, or drop it", ("dp",)
    ),
    **{
        f"distillation.{leaf}": Refusal(reason, switch="distillation.enabled")
        for leaf, reason in _DISTILLATION_LEAVES.items()
    },
    **{
        f"skip.{stage}": Refusal(
            "rollouts are never replayed from a file; write enable=False", OFF, switch="enable"
        )
        for stage in ("rollout", "rollout_tq", "async_rollout")
    },
    "skip.action": Refusal("rollouts are never replayed from a file; drop it", ("cache", None)),
    "async_training.use_trainer_do_validate": Refusal("validation runs on the engines; write False", OFF),
    "async_training.use_dynamic_resource_scheduling": Refusal("devices keep their role; write False", OFF),
    **{
        f"async_training.dynamic_schedule_{option}": Refusal(
            "devices keep their role; drop it", switch="async_training.use_dynamic_resource_scheduling"
        )
        for option in ("policy", "deactivate_ratio", "enable_rebalance")
    },
    "async_training.compute_prox_log_prob": Refusal(
        "algorithm.rollout_correction.bypass_mode=False recomputes the proximal policy; write that", OFF
    ),
    "async_training.compute_advantage_in_rollout": Refusal(
        "advantages are computed by the driver; write False", OFF
    ),
    "async_training.checkpoint_engine": Refusal(
        "weights travel as actor_rollout_ref.rollout.checkpoint_engine says; write that",
        (True, False, None, 4096),
    ),
    "atropos": Refusal(
        "environments served by Atropos are not supported; write actor_rollout_ref.rollout.environment.name"
    ),
    "algorithm.codapo_top_k": Refusal("CoDaPO is not built; drop it"),
    "algorithm.codapo_weight_offset": Refusal("CoDaPO is not built; drop it"),
    "algorithm.codapo_accuracy_key": Refusal("CoDaPO is not built; drop it"),
    "hydra": Refusal("a run's files go to trainer.default_local_dir; write that"),
}


RENAMED = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
}
"""Refused keys whose values hold under another one. A run refuses them too, because some releases of verl
ignore them."""

DEAD_IN_VERL = (
    f"{_ACTOR}.freeze_vision_tower",
    f"{_ACTOR}.use_prefix_grouper",
    "data.chat_template_func",
    "data.filter_prompts",
)
"""Keys that verl's newest release has and never reads."""


_DISTILLED = "distillation.distillation_loss"
_BY_THE_AUTHORS = Refusal("it has the value of the method's authors; drop it")
_FIXED = "it is fixed at {}; drop it"
_REMOVED = {
    f"{_ROLLOUT}.seed": Refusal("every request has a seed of its own; write trainer.seed", (0, 42, None)),
    **{
        key: Refusal(_FIXED.format(value), (value,))
        for key, value in {
            "trainer.max_nonfinite_updates": 3,
            "trainer.alerts.reward_drop": 0.5,
            "algorithm.rollout_correction.max_skipped_updates": 10,
            f"{_ROLLOUT}.max_engine_replacements": 3,
            f"{_ROLLOUT}.sync_proof.canary_max_tokens": 32,
        }.items()
    },
    f"{_ROLLOUT}.engine_timeout_seconds": Refusal(
        "the limit of all processes holds; write trainer.hang_timeout_seconds"
    ),
    "ray_kwargs.ray_init.loopback_only": Refusal(
        "a local Ray listens on 127.0.0.1 alone; start Ray yourself and write ray_kwargs.ray_init.address",
        (True,),
    ),
    "reward.memory_limit_megabytes": Refusal("only a run has a limit of memory; drop it", (None,)),
    "reward.on_failure": Refusal("write reward.failure_score instead, for score", ("stop",)),
    f"{_REF}.fsdp_config.optimizer_offload": Refusal("it scores without an optimizer; drop it", EITHER),
    f"{_DISTILLED}.policy_loss_mode": Refusal("there is PPO's clip alone; write vanilla", ("vanilla", None)),
    **{
        f"{_ACTOR}.policy_loss.{leaf}": _BY_THE_AUTHORS
        for leaf in (
            *("ratio_lower_start", "ratio_lower_max", "ratio_upper_start", "ratio_upper_max"),
            *("ratio_upper_step", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        )
    },
}
"""Keys that this project once had."""


def _table() -> dict[str, Refusal]:
    table = _OTHER_LEAVES | _REMOVED
    for role in (_ACTOR, _REF, "critic"):
        table |= {f"{role}.fsdp_config.{leaf}": row for leaf, row in FSDP_LEAVES.items()}
        table |= {
            f"{role}.{leaf}": row for leaf, row in WORKER_LEAVES.items() if f"{role}.{leaf}" not in table
        }
    for role in (_ACTOR, _REF, "critic", _ROLLOUT):
        switch = f"{role}.profiler.enable"
        table |= {
            f"{role}.profiler.{leaf}": replace(row, switch=switch) for leaf, row in PROFILER_LEAVES.items()
        }
    for model in (_MODEL, "critic.model"):
        table |= {f"{model}.{leaf}": row for leaf, row in MODEL_LEAVES.items()}
        table |= {f"{model}.lora.{leaf}": row for leaf, row in LORA_LEAVES.items()}
    megatron_lora = Refusal(MEGATRON_LORA, (0,), switch=f"{_MODEL}.lora.rank")
    table |= {f"{_MODEL}.lora.{leaf}": megatron_lora for leaf in MEGATRON_LORA_LEAVES}
    table |= {
        f"{_SERVER}.{leaf}": replace(row, switch="reward.reward_model.enable")
        for leaf, row in _SERVER_LEAVES.items()
    }
    table["critic.model.lora"] = Refusal(MEGATRON_LORA, (0,), switch="rank")
    sections = ((_ROLLOUT, _ROLLOUT_LEAVES), ("data", _DATA_LEAVES), ("trainer", _TRAINER_LEAVES))
    return table | {f"{section}.{leaf}": row for section, leaves in sections for leaf, row in leaves.items()}


REFUSALS = _table()
"""Keys and whole sections, each with its reason; the longest entry that a key lies under holds for it."""

_ENGINES = "is not supported; write vllm"
REFUSED_VALUES = {
    **{
        ("distillation.distillation_loss.loss_mode", name): f"{name} is not built; write "
        "forward_kl_topk, k3, or k1 with use_policy_gradient=True"
        for name in ("forward_kl_topk_tail", "eopd", "nitrobrew")
    },
    **{
        (f"{_ROLLOUT}.name", name): f"the engine {name} {_ENGINES}"
        for name in ("sglang", "trtllm", "hf", "naive")
    },
    **{
        ("global_profiler.tool", name): "vendor profilers are not supported; write torch"
        for name in ("nsys", "npu", "torch_memory", "memray", "precision_debugger")
    },
    ("trainer.device", "npu"): "NPUs are not supported; write cuda, cpu or auto",
    **{
        (f"{_ROLLOUT}.checkpoint_engine.backend", name): f"the transport {name} is not supported; write auto"
        for name in ("hccl", "nixl", "kimi_ckpt_engine", "mooncake")
    },
    (
        "algorithm.adv_estimator",
        "codapo",
    ): "CoDaPO is not built; give one of your own as module:function, or write grpo",
}
"""Values of this schema's keys that verl supports and this project refuses: (key, value) to the reason and
the remedy."""


def refusal_of(key: str) -> tuple[str, Refusal] | None:
    """The name and the entry of the key or section that contains ``key``; None when it is not refused."""
    parts = key.split(".")
    if parts[:2] == ["distillation", "teacher_models"]:
        parts[2:3] = ["teacher_model"]  # teachers have any names
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(((name, REFUSALS[name]) for name in names if name in REFUSALS), None)
