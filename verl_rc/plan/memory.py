"""Estimates of a run's memory and disk usage from a model's shape and the configuration, with the keys that
reduce them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from verl_rc.config.models import (
    FsdpConfig,
    LearnerFsdpConfig,
    ModelConfig,
    adapter_room,
    model_source,
    recomputes_activations,
)
from verl_rc.config.rollout import DEFAULT_CPU_CACHE_MEGABYTES, RolloutConfig
from verl_rc.config.run import RunConfig, fsdp_section
from verl_rc.config.schema import with_value
from verl_rc.plan.driver import MIB, driver_bytes
from verl_rc.plan.run_plan.schedule import LongestRows, UpdateArithmetic, plan_arithmetic
from verl_rc.records.vision_models import VISION_FAMILIES
from verl_rc.runtime.workers.experts import idle_share
from verl_rc.runtime.workers.language_model import language_model_class, torch_dtype
from verl_rc.tensor_ops.logprobs import logits_at_once

# Proportional set sizes (PSS) in MiB, without what the model and its batches add: /proc/*/smaps_rollup of all
# processes, read every 0.4 s during ten to twelve steps of recipes/quickstart_digits_cpu.sh (Linux, torch
# 2.13, vLLM 0.32, CPU builds, Ray 2.60, transformers 5.19, 2026-11-21): actor 616 and 626, engine 726 and
# 716, everything 2,186 and 2,204 at the peak; the estimate is 619, 716 and 2,235. With a critic
# (recipes/digits_cpu_gae.sh, 2026-11-23), from which no constant comes, 1,943 and 2,060; the estimate is
# 2,255. CUDA builds map more; nothing was measured there.
RAY_MIB = 400
"""Ray's own seven processes on a node (370), and workers that wait (48 each, mostly gone by the time of the
peak)."""
TRAINER_MIB = 440
"""One trainer rank, of all roles: torch, transformers, ray."""
ENGINE_MIB = 650
"""One engine: vllm, torch, ray."""

CUDA_PROCESS_MIB = 4096
"""Host memory of a trainer rank or engine with a CUDA build of torch: the middle of 3 to 5 GiB, an estimate,
as no GPU was at hand."""
CONTEXT_MIB = 2048
"""Memory of a rank's process on its GPU, for all roles: CUDA's context and NCCL's buffers. An estimate, too.
"""
ASLEEP_MIB = 2560
"""GPU memory that an engine holds while it sleeps: its context and its CUDA graphs. An estimate, too."""
_FULL_UP_TO = 0.9
"""The share of a GPU that an estimate may fill: allocators leave gaps."""

_LOGIT_COPIES = 4
"""Tensors of the size of a block of logits, in float32, alive at once in an update on a CPU: logits, softmax,
its gradient, entropy."""
_COMPILED_LOGIT_COPIES = 2
"""The same on a GPU, in the precision of the logits: logits and their gradient."""
_ACTIVATION_BYTES = 34
"""Bytes per token, layer and unit of width that a backward pass keeps in 16-bit precision (arXiv:2205.05198,
section 4, without the attention scores, which fused kernels do not keep)."""
_RECOMPUTED_BYTES = 86
"""The same of the one layer that a backward pass with checkpointing computes again, and of its gradients:
measured by fake execution of Qwen2.5-7B (tests/helpers/counting/fake_update.py), whose gated MLP is 5.3 times
as wide, between 8k and 32k tokens."""
_WITHOUT_MLP, _MLP_BYTES, _COPY_BYTES = 36, 9.3, 11
"""The same in a layer with experts: without them; for each unit of width that a token takes of them; and for
each expert that gets a copy of the token. Measured likewise, of layers with 128 experts, between 16k and 98k
tokens: 152 bytes where a token takes 8 of width 768, 94 to 100 where it takes 4, 112 with 4 of width 1,536.
"""
_STATE_BYTES, _RECOMPUTED_STATE_BYTES = 95, 240
"""For each unit of a recurrent layer's width of values, the same beside ``_ACTIVATION_BYTES`` and
``_RECOMPUTED_BYTES``: what transformers' own implementation of a gated delta net saves for its backward pass,
counted by hooks between widths of 1,024 and 4,096 (90 to 95), and 86 / 34 times as much. The kernels of
flash-linear-attention keep less."""
_POOLED_TOKENS = 4096
"""Tokens of a step of the engine that serves a reward model: vLLM's own limit on a CPU, and much of that on a
GPU."""
_MICRO_BATCH = "ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu)"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory usage."""

    parameters: int
    """Weights; tied ones count once."""
    embedding_parameters: int
    """Weights of input and output embeddings, which quantisation does not change."""
    linear_width_sum: int
    """Σ (inputs + outputs) over the linear layers inside blocks: LoRA adapters of rank r have r times as many
    weights."""
    layers: int
    width: int
    vocabulary: int
    positions: int
    """Tokens of the longest sequence."""
    idle_parameters: int = 0
    """Weights of the experts that a token is not routed to; they need memory and no time."""
    recomputed_bytes: float = _RECOMPUTED_BYTES
    """Bytes per token and unit of width that a backward pass with checkpointing needs for one layer."""
    key_width: int = 0
    """Numbers of a token's keys and values in one layer."""
    state_bytes: int = 0
    """Bytes per token that a backward pass keeps for the recurrent layers, beside those for any layer."""
    tower: "TowerShape | None" = None
    """Its vision tower. None if it reads no pictures."""

    @classmethod
    def from_model_folder(cls, path: str, trust_remote_code: bool = False) -> "ModelShape":
        """Read the ``config.json`` of a model folder or hub id; no weights are loaded.

        Raises ``ValueError`` or ``OSError`` when transformers cannot read it.
        """
        source = model_source(path)
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            try:
                auto = language_model_class(config)
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
            except ValueError:  # many reward models are no language models
                model = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        head = model.get_output_embeddings()
        tables = [part for part in (model.get_input_embeddings(), head) if part is not None]
        embeddings = {id(part.weight): part.weight.numel() for part in tables}
        linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
        heads = text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        states = getattr(text, "linear_num_value_heads", 0) * getattr(text, "linear_value_head_dim", 0)
        experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            embedding_parameters=sum(embeddings.values()),
            linear_width_sum=sum(part.in_features + part.out_features for part in linear),
            layers=text.num_hidden_layers,
            width=text.hidden_size,
            vocabulary=text.vocab_size,
            positions=getattr(text, "max_position_embeddings", None) or sys.maxsize,
            idle_parameters=round(experts * idle_share(config)),
            recomputed_bytes=(_recomputed_bytes(text) if experts else _RECOMPUTED_BYTES)
            + _RECOMPUTED_STATE_BYTES * states / text.hidden_size,
            key_width=2 * (getattr(text, "num_key_value_heads", None) or heads) * head_size,
            tower=TowerShape.of(config),
            state_bytes=_STATE_BYTES * states * text.layer_types.count("linear_attention") if states else 0,
        )


@dataclass(frozen=True)
class TowerShape:
    """The sizes of a vision tower."""

    layers: int
    width: int
    patches_per_token: int
    numbers: int
    """Of the pixels of a patch."""

    @classmethod
    def of(cls, config: Any) -> "TowerShape | None":
        """From a model's ``config.json``. None without a tower that can be trained here."""
        if config.model_type not in VISION_FAMILIES:
            return None
        tower = config.vision_config
        numbers = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        return cls(tower.depth, tower.hidden_size, tower.spatial_merge_size**2, numbers)

    def bytes_of(self, tokens: float, width: int, trained: bool, is_recomputed: bool) -> int:
        """Bytes of the pixels and the activations of pictures of so many tokens."""
        kept = self.layers if trained else 1
        per_number = _RECOMPUTED_BYTES + 2 * kept if is_recomputed else _ACTIVATION_BYTES * kept
        per_patch = 4 * self.numbers + self.width * per_number * width / 2
        return round(tokens * self.patches_per_token * per_patch)


def _recomputed_bytes(text: Any) -> float:
    """``ModelShape.recomputed_bytes`` of a layer with experts, from its ``config.json``."""
    experts_per_token: int = text.num_experts_per_tok
    expert_width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size  # of Mixtral
    mlp: float = _MLP_BYTES * expert_width / text.hidden_size
    return _WITHOUT_MLP + experts_per_token * (_COPY_BYTES + mlp)


@dataclass(frozen=True)
class RoleMemory:
    """Memory of a role in one process, in bytes; critic and frozen policies live in the processes of the
    actor."""

    role: str
    processes: int
    weights: int
    gathered: int = 0
    """Unsharded weights of the layers that compute, beside the rank's shards."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0
    """Key-value cache."""
    baseline: int = 0
    """Memory of the imported libraries; the actor's part carries that of a rank's process."""
    reducing_keys: str = ""
    """Keys that make it smaller."""

    @property
    def model(self) -> int:
        """Bytes without those of the libraries."""
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations + self.cache

    @property
    def per_process(self) -> int:
        """Peak memory of one process."""
        return self.model + self.baseline

    @property
    def total(self) -> int:
        """Peak memory of all processes of the role."""
        return self.per_process * self.processes


def estimate_roles(
    config: RunConfig, shapes: Mapping[str, ModelShape], gpu_bytes: int | None
) -> list[RoleMemory]:
    """Peak memory of every role; ``shapes`` by model path. ``gpu_bytes``: memory of one GPU; None on a CPU.

    On a CPU allocators do not return memory, so a machine needs the sum of the peaks of all processes.
    """
    policy, critic, sizes = config.actor_rollout_ref, config.critic, plan_arithmetic(config)
    on_gpus, model = gpu_bytes is not None, policy.model
    shape, fsdp = shapes[model.path], policy.actor.fsdp_config
    actor = _learner("actor", shape, fsdp, config.num_ranks, _trained_parameters(model, shape))
    peak = _update_bytes(config, actor, shape, fsdp, sizes.actor, gpu_bytes)
    roles = [
        replace(
            actor,
            activations=max(peak, _bucket_bytes(policy.rollout, shape)),
            baseline=_library_bytes(TRAINER_MIB, on_gpus),
            reducing_keys=f"actor_rollout_ref.actor.{_MICRO_BATCH}",
        )
    ]
    if sizes.critic is not None:
        shape, fsdp = shapes[critic.model.path], critic.fsdp_config
        learner = _learner("critic", shape, fsdp, config.num_ranks, shape.parameters)
        peak = _update_bytes(config, learner, shape, fsdp, sizes.critic, gpu_bytes)
        roles.append(replace(learner, activations=peak, reducing_keys=f"critic.{_MICRO_BATCH}"))
    for role, frozen in config.frozen_policies.items():
        scorer = _learner(
            role, shapes[frozen.model_path], frozen.config.fsdp_config, config.num_ranks, trained=0
        )
        reducing_key = f"{fsdp_section(role)}.model_dtype=bfloat16 (the default is fp32)"
        roles.append(replace(scorer, reducing_keys=reducing_key))
    if config.reward.reward_model.enable:
        roles.append(_reward_model(config, shapes[str(config.reward.reward_model.model_path)], gpu_bytes))
    return [*roles, _engine(config, shapes[model.path], gpu_bytes)]


def _library_bytes(mebibytes: int, on_gpus: bool) -> int:
    """Host memory of a process before it loads a model; ``mebibytes`` with CPU builds."""
    return (CUDA_PROCESS_MIB if on_gpus else mebibytes) * MIB


def _bucket_bytes(rollout: RolloutConfig, shape: ModelShape) -> int:
    """Bytes of the largest bucket in which weights travel to engines."""
    model_bytes = shape.parameters * _bytes(rollout.dtype)
    return min(rollout.checkpoint_engine.update_weights_bucket_megabytes * MIB, model_bytes)


def _update_bytes(
    config: RunConfig,
    learner: RoleMemory,
    shape: ModelShape,
    fsdp: LearnerFsdpConfig,
    update: UpdateArithmetic,
    gpu_bytes: int | None,
) -> int:
    """Peak bytes of an update: activations at the start of a backward pass and a block of logits, or the last
    unit's gradient, which is reduced when gathered weights are freed."""
    is_actor, model = learner.role == "actor", config.actor_rollout_ref.model
    longest, width = LongestRows.of(config, learner.role), _bytes(fsdp.dtype)
    tokens, rows = _micro_batch(update, longest)
    numbers = tokens * shape.width
    activations = numbers * _ACTIVATION_BYTES * width // 2 * shape.layers + tokens * shape.state_bytes
    is_recomputed = recomputes_activations(model if is_actor else config.critic.model, gpu_bytes is not None)
    if is_recomputed:
        recomputed = round(numbers * shape.recomputed_bytes * width / 2)
        activations = numbers * width * shape.layers + recomputed
    if longest.siblings > 1 and rows > 1:  # each row gathers the keys and values of its prompt
        gathered = round(rows * (longest.prompt + longest.response) * shape.key_width * width)
        activations += gathered * (1 if is_recomputed else shape.layers)
    if is_actor and shape.tower is not None:
        trained = not config.actor_rollout_ref.actor.freeze_vision_tower
        tokens_of_pictures = max(1, rows / longest.siblings) * longest.prompt  # all that prompts can have
        activations += shape.tower.bytes_of(tokens_of_pictures, width, trained, is_recomputed)
    if is_actor:
        logit_bytes = _bytes(model.head_dtype or fsdp.dtype)
        predicted = int(rows * longest.response)
        logits = min(predicted * shape.vocabulary, logits_at_once(gpu_bytes, logit_bytes))
        copies = 4 * _LOGIT_COPIES if gpu_bytes is None else logit_bytes * _COMPILED_LOGIT_COPIES
        activations += logits * copies
    if learner.processes > 1 and fsdp.use_no_sync_for_gradient_accumulation is False:
        # The gradient of the layer before is reduced meanwhile.
        layer_bytes = (shape.parameters - shape.embedding_parameters) // shape.layers * _reduced_bytes(fsdp)
        activations += min(layer_bytes, learner.activations)
    return max(activations, learner.activations - learner.gathered)


def _reduced_bytes(fsdp: FsdpConfig) -> int:
    """Bytes of a gradient's number while ranks reduce it: the result of backward, and a float32 copy."""
    return _bytes(fsdp.dtype) + 4


def _bytes(precision: str) -> int:
    """Bytes of one number."""
    return torch_dtype(precision).itemsize


def _trained_parameters(model: ModelConfig, shape: ModelShape) -> int:
    """The number of trained parameters: all of them, or with LoRA those of the adapters."""
    return model.lora_rank * shape.linear_width_sum if model.lora_rank else shape.parameters


def _learner(role: str, shape: ModelShape, fsdp: FsdpConfig, ranks: int, trained: int) -> RoleMemory:
    """Memory of a rank of a sharded model: its share of weights, gradients and AdamW's two moments.

    ``trained``: weights with gradients; 0 for a frozen policy.
    """
    master, compute = _bytes(fsdp.model_dtype), _bytes(fsdp.dtype)
    ranks_per_copy = fsdp.ranks_per_copy(ranks)
    is_gathered = ranks_per_copy > 1 or master != compute
    gathered = (shape.embedding_parameters + shape.parameters // shape.layers) * compute if is_gathered else 0
    sums_shards = isinstance(fsdp, LearnerFsdpConfig) and fsdp.use_no_sync_for_gradient_accumulation is False
    gradients = trained * master if ranks == 1 else trained * 4 // (ranks_per_copy if sums_shards else 1)
    return RoleMemory(
        role,
        processes=ranks,
        weights=shape.parameters * master // ranks_per_copy,
        gathered=gathered,
        gradients=gradients,
        optimizer=2 * trained * master // ranks_per_copy,
        # The gradient of the last unit, which is reduced when its activations are freed.
        activations=min(trained, max(shape.embedding_parameters, shape.parameters // shape.layers))
        * _reduced_bytes(fsdp)
        if ranks > 1
        else 0,
    )


def _reward_model(config: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> RoleMemory:
    reward_model, width = config.reward.reward_model, _bytes(config.reward.reward_model.dtype)
    engine = reward_model.rollout
    tokens = reward_model.micro_batch_size_per_gpu * (reward_model.max_length or config.longest_sequence)
    processes, library, cache, key = 1, TRAINER_MIB, 0, "micro_batch_size_per_gpu"
    if engine.name is not None:
        tokens, processes, library = _POOLED_TOKENS, engine.tensor_model_parallel_size, ENGINE_MIB
        cache, key = DEFAULT_CPU_CACHE_MEGABYTES * MIB, "rollout.gpu_memory_utilization"
    weights = shape.parameters * width // processes
    layer_bytes = tokens * shape.width * _ACTIVATION_BYTES * width // 2
    if engine.name is not None and gpu_bytes is not None:
        cache = max(int(engine.gpu_memory_utilization * gpu_bytes) - weights - layer_bytes, 0)
    return RoleMemory(
        "reward model",
        processes=processes,
        weights=weights,
        activations=layer_bytes,
        cache=cache,
        baseline=_library_bytes(library, gpu_bytes is not None),
        reducing_keys=f"reward.reward_model.{key}, or reward.reward_model.dtype=bfloat16",
    )


def _engine(config: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> RoleMemory:
    rollout = config.actor_rollout_ref.rollout
    per_engine, width = rollout.tensor_model_parallel_size, _bytes(rollout.dtype)
    blocks = shape.parameters - shape.embedding_parameters
    weights = shape.embedding_parameters * width + blocks * (1 if rollout.quantization else width)
    if gpu_bytes is None and _bytes(config.actor_rollout_ref.model.head_dtype or rollout.dtype) > width:
        weights += shape.vocabulary * shape.width * 4  # the head in float32, cast once for every update
    adapter = config.actor_rollout_ref.model.adapter_rank
    # An adapter as it was received, and in the padded form in which it computes.
    weights += (adapter + adapter_room(adapter)) * shape.linear_width_sum * width
    staged = shape.parameters * width if rollout.checkpoint_engine.stage_updates else 0
    # Where engines share no device, the KV cache stays while weights arrive: a bucket that is received, one
    # that is loaded, and the tensors of a layer that is not complete.
    is_alone = not config.actor_rollout_ref.hybrid_engine
    arriving = is_alone * (2 * _bucket_bytes(rollout, shape) + blocks // shape.layers * width)
    logits = min(rollout.max_num_seqs, config.rows_per_step) * shape.vocabulary * 4 * 2
    if rollout.kv_cache_megabytes is not None:
        cache, reducing_key = rollout.kv_cache_megabytes * MIB, "kv_cache_megabytes"
    elif gpu_bytes is None:
        cache, reducing_key = DEFAULT_CPU_CACHE_MEGABYTES * MIB, "kv_cache_megabytes"
    else:
        cache = max(int(rollout.gpu_memory_utilization * gpu_bytes) - weights // per_engine - logits, 0)
        reducing_key = "gpu_memory_utilization"
    return RoleMemory(
        "engine",
        processes=config.num_engines * per_engine,
        weights=weights // per_engine + staged,
        activations=logits + arriving,
        cache=cache,
        baseline=_library_bytes(ENGINE_MIB, gpu_bytes is not None),
        reducing_keys=f"actor_rollout_ref.rollout.{reducing_key}",
    )


def _micro_batch(update: UpdateArithmetic, longest: LongestRows) -> tuple[int, float]:
    """Tokens of the fullest micro-batch on one rank, and the rows that they are of; ranks of a group share
    them."""
    _, rows = update.rows_per_group
    if update.max_tokens is None:
        rows = min(update.max_rows or 1, rows)
    tokens = -(-longest.tokens(rows) // update.ranks_per_group)
    if update.max_tokens is None or tokens <= update.max_tokens:
        return tokens, rows / update.ranks_per_group
    return update.max_tokens, update.max_tokens * longest.siblings / longest.tokens(longest.siblings)


def host_bytes(config: RunConfig, roles: Sequence[RoleMemory], on_gpu: bool) -> int:
    """Host memory of the run; with GPUs, that of libraries, offloaded weights and moments, and copies for
    checkpoints."""
    per_role = [role.baseline * role.processes if on_gpu else role.total for role in roles]
    at_rest = _at_rest(config, roles)
    offloaded = sum(
        role.processes * (role.weights + role.optimizer - at_rest[role.role])
        for role in roles
        if role.role in at_rest
    )
    extra = _copied_bytes(config, roles) + (offloaded if on_gpu else 0)
    # Roles of a rank compute one after the other and reuse each other's memory.
    transient = [role.gathered + role.activations for role in roles if role.role in at_rest]
    reused = 0 if on_gpu else (sum(transient) - max(transient)) * config.num_ranks
    return sum(per_role) - reused + driver_bytes(config) + RAY_MIB * MIB + extra


def _copied_bytes(config: RunConfig, roles: Sequence[RoleMemory]) -> int:
    """Bytes of the host copies of trained weights and both moments that ``async_save`` writes from."""
    if config.trainer.save_freq <= 0 or not config.actor_rollout_ref.actor.checkpoint.async_save:
        return 0
    return sum(role.processes * role.optimizer * 3 // 2 for role in roles)


def gpu_peaks(config: RunConfig, roles: Sequence[RoleMemory]) -> dict[str, int]:
    """Peak memory of one GPU by phase, an update and generation; engines may share the GPUs and sleep during
    the update."""
    engine = next(role for role in roles if role.role == "engine")
    sampling = engine.model
    if config.actor_rollout_ref.hybrid_engine:
        at_rest, actor = _at_rest(config, roles), next(role for role in roles if role.role == "actor")
        # The actor scores canary tokens while the engine is awake: offloaded weights come back for it.
        is_offloaded = config.actor_rollout_ref.actor.fsdp_config.param_offload
        canaries = actor.gathered + actor.weights * is_offloaded
        sampling += sum(at_rest.values()) + CONTEXT_MIB * MIB + canaries
    return {"an update": max(gpu_update_peaks(config, roles).values()), "generation": sampling}


def gpu_update_peaks(config: RunConfig, roles: Sequence[RoleMemory]) -> dict[str, int]:
    """Peak memory of one GPU while each role updates or, if frozen, scores, with the resting bytes of the
    others."""
    engine = next(role for role in roles if role.role == "engine")
    rollout, at_rest = config.actor_rollout_ref.rollout, _at_rest(config, roles)
    fixed_bytes = CONTEXT_MIB * MIB
    if config.actor_rollout_ref.hybrid_engine:
        fixed_bytes += ASLEEP_MIB * MIB if rollout.free_cache_engine else engine.model
    return {
        role.role: fixed_bytes + sum(at_rest.values()) - at_rest[role.role] + role.model
        for role in roles
        if role.role in at_rest
    }


def _at_rest(config: RunConfig, roles: Sequence[RoleMemory]) -> dict[str, int]:
    """Bytes that a rank of each role keeps on its GPU between two uses."""
    configs = config.fsdp_configs
    return {
        role.role: role.weights * (not configs[role.role].param_offload)
        + role.optimizer * (not getattr(configs[role.role], "optimizer_offload", False))
        for role in roles
        if role.role in configs
    }


@dataclass(frozen=True)
class GradientChoice:
    """The way in which a role's ranks add up gradients, where the configuration leaves it open."""

    role: str
    unsharded: bool
    """Whether each rank adds up unsharded gradients; otherwise it adds up its shard of them."""
    update_bytes: int
    """Peak memory of a GPU in an update with unsharded gradients."""
    gpu_bytes: int
    """Memory of a GPU."""

    def __str__(self) -> str:
        """The choice and its reason in a sentence."""
        moment = "once a mini-batch" if self.unsharded else "after every micro-batch"
        return (
            f"{self.role}: ranks reduce gradients {moment}: with whole gradients on each rank an update "
            f"would take {_gib(self.update_bytes)} of a GPU's {_gib(self.gpu_bytes)} GiB"
        )


_GRADIENT_SUM_KEY = "use_no_sync_for_gradient_accumulation"


def choose_gradient_sums(
    config: RunConfig, shapes: Mapping[str, ModelShape], gpu_bytes: int | None
) -> tuple[RunConfig, list[GradientChoice]]:
    """``config`` with a value for each null ``use_no_sync_for_gradient_accumulation``, and the choices.

    Gradients are unsharded where an update with them fits. On a CPU (``gpu_bytes`` is None) and on one rank
    null means unsharded, and stays.
    """
    if gpu_bytes is None or config.num_ranks == 1:
        return config, []
    peaks = gpu_update_peaks(config, estimate_roles(config, shapes, gpu_bytes))
    choices = [
        GradientChoice(role, peaks[role] <= _FULL_UP_TO * gpu_bytes, peaks[role], gpu_bytes)
        for role, fsdp in config.fsdp_configs.items()
        if isinstance(fsdp, LearnerFsdpConfig) and fsdp.use_no_sync_for_gradient_accumulation is None
    ]
    for choice in choices:
        config = with_value(config, f"{fsdp_section(choice.role)}.{_GRADIENT_SUM_KEY}", choice.unsharded)
    return config, choices


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.0f}"


def checkpoint_bytes(config: RunConfig, shapes: Mapping[str, ModelShape]) -> int:
    """Bytes of a checkpoint: weights and moments of actor and critic; with LoRA, those of the adapters."""
    model, critic = config.actor_rollout_ref.model, config.critic
    size = (
        3
        * _trained_parameters(model, shapes[model.path])
        * _bytes(config.actor_rollout_ref.actor.fsdp_config.model_dtype)
    )
    if config.needs_critic:
        size += 3 * shapes[critic.model.path].parameters * _bytes(critic.fsdp_config.model_dtype)
    return size


def model_paths(config: RunConfig) -> dict[str, bool]:
    """The path of every model of a run, and whether its remote code is trusted."""
    paths: dict[str, bool] = {}
    for path, trusted in config.models.values():
        paths.setdefault(path, trusted)
    return paths
