"""Checks across configuration keys, and of the files and folders they name, before a run starts."""

import math
from collections.abc import Callable, Iterator

from verl_rc.config.algorithm import REWARD_METRICS
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, LOSS_MODES, LOSS_OPTIONS, POLICY_LOSSES
from verl_rc.config.async_checks import check_async_training
from verl_rc.config.centering_checks import check_centering
from verl_rc.config.device_checks import check_device
from verl_rc.config.distillation_checks import check_distillation
from verl_rc.config.errors import ConfigError
from verl_rc.config.exact_checks import check_exact_mode
from verl_rc.config.models import (
    ENGINE_ADAPTER_RANKS,
    CriticModelConfig,
    LearnerFsdpConfig,
    ModelConfig,
    ReferenceConfig,
    torch_name,
)
from verl_rc.config.profiler_checks import check_profiler
from verl_rc.config.rollout import OWNED_ENGINE_ARGUMENTS, EnvironmentConfig, MultiTurnConfig, RolloutConfig
from verl_rc.config.run import RunConfig, fsdp_section


def check_run(config: RunConfig) -> None:
    """Raise ``ConfigError`` with every contradiction found: key, what must hold, what was given, what to
    do."""
    problems = [problem for check in _CHECKS for problem in check(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    weights = data.train_weights
    if weights is not None and len(weights) != len(data.train_files):
        yield (
            f"data.train_weights must hold one number for each of the {len(data.train_files)} "
            f"data.train_files, got {len(weights)} numbers."
        )
    if weights is not None and not all(0 < weight < math.inf for weight in weights):
        yield (
            f"data.train_weights must be positive numbers, got {weights}; remove the file instead of giving "
            "it no weight."
        )
    if not data.train_files and data.custom_cls.path is None:
        yield "data.train_files must name at least one file, got an empty list."
    if not data.val_files and config.trainer.validates:
        yield (
            "validation needs data.val_files, got none. Name them, or train without validation: "
            "trainer.test_freq=-1 trainer.val_before_train=False trainer.val_only=False."
        )
    for key, count in (("train", data.train_max_samples), ("val", data.val_max_samples)):
        if count == 0:
            yield f"data.{key}_max_samples must be -1 (all prompts) or at least 1, got 0."
    if (data.custom_cls.path is None) != (data.custom_cls.name is None):
        yield (
            f"data.custom_cls.path and data.custom_cls.name belong together, got {data.custom_cls.path!r} "
            f"and {data.custom_cls.name!r}."
        )
    if weights is not None and data.custom_cls.path is not None:
        yield (
            "data.train_weights is refused with data.custom_cls: the class mixes what it reads itself. Drop "
            "one of them."
        )


def _batch_arithmetic(config: RunConfig) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    ranks, samples = config.num_ranks, config.actor_rollout_ref.rollout.n
    minis = {"actor_rollout_ref.actor.ppo_mini_batch_size": (mini, "actor")}
    sharing = config.sequence_parallel_sizes
    critics = config.critic.ppo_mini_batch_size
    if config.needs_critic and (critics != mini or sharing["critic"] < sharing["actor"]):
        minis["critic.ppo_mini_batch_size"] = (critics, "critic")
    for key, (size, role) in minis.items():
        if batch % size:
            yield (
                f"data.train_batch_size must be a multiple of {key} (both count prompts), got {batch} and "
                f"{size}. For example ppo_mini_batch_size={math.gcd(batch, size)}."
            )
        groups = ranks // sharing[role]
        if size * samples < groups:
            receivers = (
                f"{ranks} trainer ranks"
                if groups == ranks
                else f"{groups} groups of {sharing[role]} trainer ranks"
            )
            yield (
                f"a mini-batch of {key} x rollout.n = {size} x {samples} = {size * samples} rows must give "
                f"each of the {receivers} (trainer.nnodes x trainer.n_gpus_per_node) at least one row."
            )
    estimator = config.algorithm.estimator
    if config.algorithm.estimator_reads("values") and config.critic.enable is False:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, but "
            "critic.enable=False was given. Drop it, or choose an estimator that compares samples, such as "
            "algorithm.adv_estimator=grpo."
        )
    if estimator is not None and estimator.needs_several_samples and samples < 2:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares samples of one prompt and "
            f"needs actor_rollout_ref.rollout.n >= 2, got {samples}: every advantage would be 0. Raise it, "
            "or pass an estimator that trains on the score itself, such as "
            "algorithm.adv_estimator=reinforce_plus_plus."
        )


def _activations(config: RunConfig) -> Iterator[str]:
    models: dict[str, ModelConfig | CriticModelConfig] = {
        "actor_rollout_ref.model": config.actor_rollout_ref.model
    }
    if config.needs_critic:
        models["critic.model"] = config.critic.model
    for section, model in models.items():
        if model.enable_activation_offload and model.enable_gradient_checkpointing is False:
            yield (
                f"{section}.enable_activation_offload=True keeps the inputs of recomputed layers in host "
                f"memory, and needs {section}.enable_gradient_checkpointing=True, got False; drop one."
            )


def _refreshed_reference(config: RunConfig) -> Iterator[str]:
    policy, key = config.actor_rollout_ref, "actor_rollout_ref.ref.sync_freq"
    if not (config.needs_reference and policy.ref.sync_freq):
        return
    if policy.model.lora_rank:
        yield (
            f"{key} must be 0 with LoRA, whose reference is the actor without its adapters, got "
            f"{policy.ref.sync_freq}; drop it, or write lora_rank=0."
        )
    if policy.ref.model_path != policy.model.path:
        yield (
            f"{key}={policy.ref.sync_freq} makes the reference the actor, and needs one model: drop "
            f"actor_rollout_ref.ref.model_path={policy.ref.model_path}, or sync_freq."
        )
    sizes = policy.ref.fsdp_config.fsdp_size, policy.actor.fsdp_config.fsdp_size
    if sizes[0] != sizes[1]:
        yield (
            f"{key}={policy.ref.sync_freq} needs actor_rollout_ref.ref.fsdp_config.fsdp_size to be that of "
            f"the actor, {sizes[1]}, got {sizes[0]}."
        )


def _entropy_target(config: RunConfig) -> Iterator[str]:
    key, target = (
        "algorithm.adaptive_entropy.target_entropy",
        config.algorithm.adaptive_entropy.target_entropy,
    )
    if target is None:
        return
    coefficient = config.actor_rollout_ref.actor.entropy_coeff
    if coefficient:
        yield (
            f"{key} sets the weight of the entropy and needs actor_rollout_ref.actor.entropy_coeff=0, got "
            f"{coefficient}; drop one of them."
        )
    if config.algorithm.rollout_correction.mode != "decoupled":
        yield (
            f"{key} needs the entropy before each update, which only the decoupled mode computes: write "
            "algorithm.rollout_correction.bypass_mode=False, and no proximal=interpolate; got "
            f"{config.algorithm.rollout_correction.mode}."
        )
    top_k = config.actor_rollout_ref.rollout.top_k
    if top_k > 0 and target >= math.log(top_k):
        yield (
            f"{key} must be below {math.log(top_k):.2f} nats, the largest entropy of "
            f"actor_rollout_ref.rollout.top_k={top_k} tokens, got {target}."
        )


def _names(config: RunConfig) -> Iterator[str]:
    loss = config.actor_rollout_ref.actor.policy_loss
    names = {
        "algorithm.adv_estimator": (config.algorithm.adv_estimator, ADVANTAGE_ESTIMATORS),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (loss.loss_mode, LOSS_MODES),
    }
    for key, (name, choices) in names.items():
        if name not in choices and ":" not in name:
            yield f"{key} must be one of {', '.join(choices)}, or module:function; got {name!r}."
    baseline = config.algorithm.rollout_correction.rejected_in_group_baseline
    estimator = config.algorithm.estimator
    if baseline == "exclude" and estimator is not None and not estimator.compares_groups:
        yield (
            "algorithm.rollout_correction.rejected_in_group_baseline=exclude needs an estimator that "
            f"compares samples of one prompt, got algorithm.adv_estimator={config.algorithm.adv_estimator}; "
            "pass include, or another estimator."
        )
    if (
        config.algorithm.rollout_correction.rejection_denominator == "kept"
        and config.actor_rollout_ref.actor.loss_agg_mode == "token-sum"
    ):
        yield (
            "algorithm.rollout_correction.rejection_denominator=kept needs a loss that is divided by "
            "something, got actor_rollout_ref.actor.loss_agg_mode=token-sum; pass original, or token-mean."
        )
    chosen_loss = POLICY_LOSSES.get(loss.loss_mode)
    for option in (option for option in LOSS_OPTIONS if option.is_required):
        is_read = chosen_loss is not None and option in chosen_loss.options
        value = option.value(config.actor_rollout_ref.actor)
        if is_read != (value is not None):
            owners = ", ".join(name for name, spec in POLICY_LOSSES.items() if option in spec.options)
            yield (
                f"actor_rollout_ref.actor.{option.key} belongs to loss_mode={owners}, which needs it; got "
                f"loss_mode={loss.loss_mode} and {option.key.rpartition('.')[2]}={value}."
            )


def _estimators(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    name, keys, weights = algorithm.adv_estimator, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    correction = algorithm.rollout_correction
    if algorithm.estimator is not None and algorithm.adv_estimator_inputs:
        yield (
            "algorithm.adv_estimator_inputs declares what a module:function estimator reads; got "
            f"{algorithm.adv_estimator_inputs} with {name}, whose inputs are known. Drop it."
        )
    if algorithm.estimator_reads("sum_pi_squared") and correction.mode != "decoupled":
        yield (
            f"algorithm.adv_estimator={name} needs the proximal policy's probabilities, which bypass mode "
            "and interpolation do not compute: pass algorithm.rollout_correction.bypass_mode=False and "
            "proximal=recompute, or another estimator."
        )
    if algorithm.estimator_reads("component_scores") != bool(keys):
        owners = ", ".join(
            owner for owner, spec in ADVANTAGE_ESTIMATORS.items() if "component_scores" in spec.inputs
        )
        yield (
            f"algorithm.gdpo_reward_keys belongs to algorithm.adv_estimator={owners}, which needs it: the "
            f"columns of the reward function that are normalised one by one. Got {keys} with "
            f"adv_estimator={name}."
        )
    if weights is not None and len(weights) != len(keys or []):
        yield (
            "algorithm.gdpo_reward_weights must hold one weight for each of "
            f"algorithm.gdpo_reward_keys={keys}, got {weights}."
        )


def _dynamic_sampling(config: RunConfig) -> Iterator[str]:
    groups, data, samples = config.algorithm.filter_groups, config.data, config.actor_rollout_ref.rollout.n
    if not groups.enable and data.gen_batch_size != data.train_batch_size:
        yield (
            f"data.gen_batch_size={data.gen_batch_size} has no effect without "
            "algorithm.filter_groups.enable=True; enable that, or drop it "
            f"(data.train_batch_size={data.train_batch_size} prompts are sampled in every step)."
        )
    if not groups.enable:
        return
    if samples < 2:
        yield (
            "algorithm.filter_groups compares the samples of one prompt and needs "
            f"actor_rollout_ref.rollout.n >= 2, got {samples}; raise it, or drop "
            "algorithm.filter_groups.enable."
        )
    most = groups.max_num_gen_batches * data.gen_batch_size
    if 0 < most < data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches} batches of "
            f"data.gen_batch_size={data.gen_batch_size} prompts can never give "
            f"data.train_batch_size={data.train_batch_size}; raise either."
        )
    has_columns = (
        not config.reward.reward_model.enable or config.reward.custom_reward_function.path is not None
    )
    if groups.metric not in (*REWARD_METRICS, "score") and not has_columns:
        yield (
            f"algorithm.filter_groups.metric={groups.metric} must be a column that a reward function "
            "returns, but a reward model alone (reward.reward_model.enable=True) gives only its score; pass "
            "metric=reward."
        )
    if groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=True would need "
            "the KL penalty of samples that are dropped, which is not computed; pass metric=reward, the "
            "score without that penalty."
        )


def _overlong_penalty(config: RunConfig) -> Iterator[str]:
    buffer, longest = config.reward.reward_kwargs.overlong_buffer_cfg, config.data.max_response_length
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    if buffer.enable and (buffer.len is None or buffer.len > longest):
        yield (
            f"{key}.len must be given with {key}.enable=True, and be at most "
            f"data.max_response_length={longest}; got {buffer.len}."
        )


def _token_budgets(config: RunConfig) -> Iterator[str]:
    rollout, critic = config.actor_rollout_ref.rollout, config.critic
    yield from _budgets_below_the_longest_row(config)
    for section, (forward, _) in _scoring_passes(config).items():
        if not forward.log_prob_use_dynamic_bsz and forward.log_prob_micro_batch_size_per_gpu is None:
            yield (
                "log-prob micro-batches need a limit: pass "
                f"{section}.log_prob_micro_batch_size_per_gpu=<rows> or "
                f"{section}.log_prob_use_dynamic_bsz=True; neither was given."
            )
    if config.needs_critic and not critic.use_dynamic_bsz and critic.ppo_micro_batch_size_per_gpu is None:
        yield (
            "the critic's micro-batches need a limit: pass critic.ppo_micro_batch_size_per_gpu=<rows> or "
            "critic.use_dynamic_bsz=True; neither was given."
        )
    if rollout.max_model_len is not None and rollout.max_model_len < config.longest_sequence:
        yield (
            f"actor_rollout_ref.rollout.max_model_len must be at least {_longest_row(config)}, got "
            f"{rollout.max_model_len}."
        )


def _budgets_below_the_longest_row(config: RunConfig) -> Iterator[str]:
    actor, critic, sharing = config.actor_rollout_ref.actor, config.critic, config.sequence_parallel_sizes
    budgets: dict[str, tuple[int, int]] = {}
    if actor.use_dynamic_bsz:
        budgets["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] = (
            actor.ppo_max_token_len_per_gpu,
            sharing["actor"],
        )
    for section, (forward, ranks) in _scoring_passes(config).items():
        budget = (forward.log_prob_max_token_len_per_gpu, ranks)
        if (
            forward.log_prob_use_dynamic_bsz and budget not in budgets.values()
        ):  # one that follows the actor's is named once
            budgets[f"{section}.log_prob_max_token_len_per_gpu"] = budget
    if config.needs_critic and critic.use_dynamic_bsz:
        budgets["critic.ppo_max_token_len_per_gpu"] = (critic.ppo_max_token_len_per_gpu, sharing["critic"])
    for key, (tokens, ranks) in budgets.items():
        if tokens * ranks < config.longest_sequence:
            fitting = -(-config.longest_sequence // ranks)
            shared = "" if ranks == 1 else f" on each of the {ranks} ranks that share a row. Pass {fitting}"
            yield f"{key} must hold the longest sequence ({_longest_row(config)}), got {tokens}{shared}."


def _longest_row(config: RunConfig) -> str:
    return f"data.max_prompt_length + data.max_response_length = {config.longest_sequence}"


def _scoring_passes(config: RunConfig) -> dict[str, tuple[RolloutConfig | ReferenceConfig, int]]:
    """Limits of passes that only compute log-probs, with the ranks that share a micro-batch, by section."""
    policy, sharing = config.actor_rollout_ref, config.sequence_parallel_sizes
    passes: dict[str, tuple[RolloutConfig | ReferenceConfig, int]] = {
        "actor_rollout_ref.rollout": (policy.rollout, sharing["actor"])
    }
    for role, frozen in config.frozen_policies.items():
        passes["actor_rollout_ref.ref"] = (frozen.config, sharing[role])
    if config.needs_reference and not config.has_reference_model:
        passes["actor_rollout_ref.ref"] = (policy.ref, sharing["actor"])
    return passes


def _sharding(config: RunConfig) -> Iterator[str]:
    ranks, policy = config.num_ranks, config.actor_rollout_ref
    if policy.model.share_prefixes is True and not policy.model.use_remove_padding:
        yield (
            "actor_rollout_ref.model.share_prefixes=True needs packed rows, but "
            "actor_rollout_ref.model.use_remove_padding=False was given; drop one of them."
        )
    for role, fsdp in config.fsdp_configs.items():
        section, sharing = fsdp_section(role), fsdp.ulysses_sequence_parallel_size
        if ranks % sharing:
            yield (
                f"{section}.ulysses_sequence_parallel_size={sharing} must divide the {ranks} trainer ranks "
                "(trainer.nnodes x trainer.n_gpus_per_node): groups of so many share each micro-batch. Pass "
                f"{_largest_divisor(ranks, sharing)}."
            )
        if sharing > 1 and not policy.model.use_remove_padding:
            yield (
                f"{section}.ulysses_sequence_parallel_size={sharing} divides packed tokens, but "
                "actor_rollout_ref.model.use_remove_padding=False was given; drop one of them."
            )
        # Groups of ranks that share a copy of the weights have one size.
        if fsdp.fsdp_size == 0 or ranks % fsdp.ranks_per_copy(ranks):
            yield (
                f"{section}.fsdp_size must divide the {ranks} trainer ranks (trainer.nnodes x "
                f"trainer.n_gpus_per_node), got {fsdp.fsdp_size}. Pass "
                f"{_largest_divisor(ranks, fsdp.fsdp_size)}, or -1 for all ranks."
            )
        if isinstance(fsdp, LearnerFsdpConfig) and torch_name(fsdp.model_dtype) == "float16":
            yield (
                f"{section}.model_dtype must be float32 or bfloat16, got {fsdp.model_dtype}: the optimizer's "
                f"small updates are lost in float16. Pass float32, and {section}.dtype=float16 for forward "
                "and backward in float16."
            )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(part for part in range(1, max(1, at_most) + 1) if number % part == 0)


def _rollout(config: RunConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    key, limit = "actor_rollout_ref.rollout", rollout.max_support
    if limit is not None and not rollout.has_filter:
        yield (
            f"{key}.max_support={limit} has no effect without a filter ({key}.top_p, top_k or min_p); "
            "drop it."
        )
    if limit is None and rollout.has_filter and rollout.top_k < 1:
        yield (
            f"{key}.top_p={rollout.top_p} and min_p={rollout.min_p} may leave the whole vocabulary at a "
            f"token, and what is left is recorded: pass {key}.top_k=20, say, or {key}.max_support=64, "
            "above which a token is left out of the loss."
        )
    if limit is not None and limit < rollout.top_k:
        yield (
            f"{key}.max_support={limit} must be at least top_k={rollout.top_k}: larger sets than it are "
            "left out of the loss. Drop it."
        )
    if rollout.sync_proof.survival_freq and rollout.quantization not in (None, "fp8_per_channel"):
        yield (
            f"{key}.sync_proof.survival_freq={rollout.sync_proof.survival_freq} needs "
            f"{key}.quantization=null or fp8_per_channel, whose rounding is known here, got "
            f"{rollout.quantization}; pass 0."
        )
    if rollout.enable_rollout_routing_replay and not rollout.enable_prefix_caching:
        yield (
            f"{key}.enable_rollout_routing_replay=True needs {key}.enable_prefix_caching=True, got False: "
            "vLLM keeps the experts of tokens beside the blocks of its prefix cache."
        )


def _engine_arguments(config: RunConfig) -> Iterator[str]:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    arguments = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    for name in sorted(set(OWNED_ENGINE_ARGUMENTS) & set(arguments)):
        yield f"{key}.{name}={arguments[name]} is refused: {OWNED_ENGINE_ARGUMENTS[name]}."
    if "head_dtype" in (arguments.get("hf_overrides") or {}):
        yield (
            f"{key}.hf_overrides.head_dtype={arguments['hf_overrides']['head_dtype']} is refused: a head in "
            "another precision on one side alone widens the gap; pass "
            "actor_rollout_ref.model.head_dtype=float32, which sets trainer and engines."
        )
    if "async_scheduling" in arguments and config.async_training.on_update != "finish":
        yield (
            f"{key}.async_scheduling={arguments['async_scheduling']} is refused: weights that change under "
            "running responses need it off, and the run turns it off; drop it."
        )


def _conversations(config: RunConfig) -> Iterator[str]:
    rollout, section = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    turns, environment, key = rollout.multi_turn, rollout.environment, f"{section}.multi_turn"
    if not turns.enable and turns != MultiTurnConfig():
        options = ", ".join(sorted(turns.model_fields_set - {"enable"}))
        yield (
            f"{key} has no effect without {key}.enable=True, but {options} was given; enable it, or drop "
            "them."
        )
    if turns.enable and not turns.tools:
        yield (
            f"{key}.enable=True needs a tool: pass {key}.tools=[calculator], or module:attribute of one of "
            f"your own, or a file of verl's as {key}.tool_config_path."
        )
    if environment.name is None and environment != EnvironmentConfig():
        options = ", ".join(sorted(environment.model_fields_set))
        yield (
            f"{section}.environment has no effect without {section}.environment.name, but {options} was "
            "given; name one, or drop them."
        )
    if rollout.allow_special_tokens and not rollout.converses:
        yield (
            f"{section}.allow_special_tokens=True has no effect without tools or an environment, whose texts "
            "it is about; drop it."
        )
    speakers = [f"{key}.enable=True"] if turns.enable else []
    if environment.name is not None:
        speakers.append(f"{section}.environment.name={environment.name}")
    if len(speakers) > 1:
        yield f"{' and '.join(speakers)} both answer the policy's turns; drop one of them."
    if speakers and rollout.ignore_eos:
        yield f"{speakers[-1]} needs turns that end, but {section}.ignore_eos=True was given; drop it."


def _engine(config: RunConfig) -> Iterator[str]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    size, node_devices = rollout.tensor_model_parallel_size, rollout.n_gpus_per_node
    # An engine lies on one node, on a shared one beside whole ranks, or takes whole nodes.
    divides = max(size, node_devices) % min(size, node_devices) == 0
    fits = divides or (size < node_devices and not config.actor_rollout_ref.hybrid_engine)
    if config.num_engine_devices % size:
        yield (
            "engine devices (rollout.nnodes x rollout.n_gpus_per_node = "
            f"{config.num_engine_devices}) must be a multiple of "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size, got {size}. Pass "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1 for one device per engine."
        )
    elif not fits:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} must divide the {node_devices} "
            "engine devices of a node (rollout.n_gpus_per_node or trainer.n_gpus_per_node) or be a multiple: "
            f"an engine lies on one node or takes whole ones. Pass {_largest_divisor(node_devices, size)}."
        )
    if model.adapter_rank > ENGINE_ADAPTER_RANKS[-1]:
        yield (
            f"actor_rollout_ref.model.lora.merge=False needs actor_rollout_ref.model.lora_rank of at most "
            f"{ENGINE_ADAPTER_RANKS[-1]}, for which vLLM has room, got {model.lora_rank}; lower it, or pass "
            "merge=True."
        )
    yield from check_device(config, config.trainer.device)
    if rollout.val_kwargs.n > 1 and rollout.val_kwargs.is_greedy:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.n={rollout.val_kwargs.n} greedy samples would all be "
            "equal: pass val_kwargs.do_sample=True and a val_kwargs.temperature > 0, or val_kwargs.n=1."
        )


def _resuming(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield (
            "trainer.resume_mode=resume_path needs trainer.resume_from_path=<.../global_step_N>; it was not "
            "given."
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} has no effect with "
            f"trainer.resume_mode={trainer.resume_mode}; pass trainer.resume_mode=resume_path, or drop it."
        )


def _devices(config: RunConfig) -> Iterator[str]:
    rollout, shared = config.actor_rollout_ref.rollout, config.actor_rollout_ref.hybrid_engine
    if shared and config.num_engine_devices != config.num_ranks:
        yield (
            f"with actor_rollout_ref.hybrid_engine=True engines share the trainer's {config.num_ranks} "
            "devices, but actor_rollout_ref.rollout.nnodes x actor_rollout_ref.rollout.n_gpus_per_node = "
            f"{config.num_engine_devices} were asked for. Drop these keys, or pass "
            "actor_rollout_ref.hybrid_engine=False for devices of their own."
        )
    if not shared and rollout.checkpoint_engine.backend == "ipc":
        yield (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=ipc needs engines on the trainer's devices, "
            "but actor_rollout_ref.hybrid_engine=False was given; pass backend=broadcast or auto."
        )


def _alerts(config: RunConfig) -> Iterator[str]:
    correction, alerts = config.algorithm.rollout_correction, config.trainer.alerts
    for name, action in (("mismatch", alerts.mismatch), ("gap", alerts.gap), ("cause", alerts.cause)):
        if action == "skip" and correction.mode != "decoupled":
            yield (
                f"trainer.alerts.{name}=skip needs a {name} that is known before the update, but in bypass "
                "mode (algorithm.rollout_correction.bypass_mode=True), and with proximal=interpolate, the "
                "update itself measures it; pass save_and_stop or warn."
            )
    if alerts.mismatch != "warn" and alerts.mismatch_limit is None:
        yield (
            f"trainer.alerts.mismatch={alerts.mismatch} needs a limit above which it acts, got "
            "trainer.alerts.mismatch_limit=null, which means never; pass a number, or drop one of them."
        )
    if alerts.cause != "warn" and correction.diagnostics != "full":
        yield (
            f"trainer.alerts.cause={alerts.cause} needs signatures; pass "
            "algorithm.rollout_correction.diagnostics=full, which measures them, or "
            "trainer.alerts.cause=warn."
        )


def _ray(config: RunConfig) -> Iterator[str]:
    ray_init = config.ray_kwargs.ray_init
    local = ray_init.model_dump(
        include={"num_cpus", "num_gpus", "object_store_memory"}, exclude_defaults=True
    )
    settings = ", ".join(f"{name}={value}" for name, value in local.items())
    if ray_init.address is not None and settings:
        yield (
            f"ray_kwargs.ray_init.address={ray_init.address} joins a running cluster, which was "
            f"started with settings of its own, but {settings} was given; drop that, or the address."
        )


_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _data,
    _batch_arithmetic,
    _activations,
    _entropy_target,
    _refreshed_reference,
    _names,
    _estimators,
    _dynamic_sampling,
    _overlong_penalty,
    _token_budgets,
    _sharding,
    _rollout,
    _engine_arguments,
    _conversations,
    _engine,
    _devices,
    check_async_training,
    check_exact_mode,
    check_distillation,
    check_centering,
    check_profiler,
    _resuming,
    _alerts,
    _ray,
)
