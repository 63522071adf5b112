"""The options that a vLLM engine is built with, from the configuration of a run."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from verl_rc.config.rollout import DEFAULT_CPU_CACHE_MEGABYTES, RolloutConfig
from verl_rc.config.run import RunConfig
from verl_rc.config.task import PixelLimits
from verl_rc.records.vision_models import reads_pictures
from verl_rc.runtime.rollout.environment_host import Hosts
from verl_rc.runtime.rollout.sampling import ConversationOptions

_VLLM_LIMIT = 999
"""vLLM's own limit of pictures in a prompt."""
OnUpdate = Literal["finish", "recompute", "keep"]
"""Effect of a weight update on running samples: it waits for their end; or they continue with the new
weights, with their KV cache recomputed, or with the KV cache of the old weights. Samples with priority always
end first.
"""


@dataclass(frozen=True)
class EngineNode:
    """One of the nodes of an engine."""

    number: int
    count: int
    """Nodes of the engine."""
    host: str
    """Address of the first node, at which the workers of all nodes meet."""
    port: int


@dataclass(frozen=True)
class VllmOptions:
    """Options of a vLLM engine, see ``EngineOptions``."""

    worker: ClassVar[str] = "verl_rc.runtime.rollout.vllm.engine:VllmEngine"
    further_worker: ClassVar[str] = "verl_rc.runtime.rollout.vllm.further_node:FurtherNode"
    model_path: str
    dtype: str
    max_model_len: int
    """Tokens of prompt and response together."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``vllm.LLM``."""
    on_update: OnUpdate = "finish"
    deterministic_steps: int | None = None
    """Steps of samples without priority with one version of the weights, after ``resume``. None means no
    limit."""
    stages_updates: bool = False
    """A broadcast update is received beside the engine's steps and loaded between two of them."""
    max_concurrent: int | None = None
    """Largest number of samples without priority that have begun and not ended. None means no limit."""
    conversation: ConversationOptions | None = None
    """Environment or tools that answer turns. None without them."""
    exact: bool = False
    """Whether the engine computes with the operations of exact mode."""
    pixel_limits: PixelLimits | None = None
    """``data.mm_processor_kwargs`` of a model that reads pictures. None for others."""
    adapter_rank: int = 0
    """Rank of the LoRA adapter that the engine applies beside its weights; 0 means that adapters come
    merged."""
    node: EngineNode | None = None
    """The node of this part of the engine. None for an engine on one node."""

    def on_nodes(self, count: int, host: str, port: int) -> "list[VllmOptions]":
        """See ``EngineOptions``."""
        return [replace(self, node=EngineNode(number, count, host, port)) for number in range(count)]

    @property
    def deterministic(self) -> bool:
        """See ``EngineOptions``: the steps of each version are counted."""
        return self.deterministic_steps is not None


def engine_options(config: RunConfig, device: str, hosts: Hosts | None = None) -> VllmOptions:
    """The options of a run's engines; see ``rollout.engine``."""
    rollout = config.actor_rollout_ref.rollout
    with_pictures = reads_pictures(config.actor_rollout_ref.model.path)
    arguments: dict[str, Any] = {
        "load_format": rollout.load_format,
        "quantization": rollout.quantization,
        "kv_cache_dtype": rollout.kv_cache_dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "uni" if rollout.tensor_model_parallel_size == 1 else "mp",
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, config.max_model_length),
        # vLLM cannot set back the random generator of a request with a chunked prompt on a CPU
        "enable_chunked_prefill": rollout.enable_chunked_prefill and device != "cpu",
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "seed": 42,  # requests have seeds of their own
        "trust_remote_code": config.actor_rollout_ref.model.trust_remote_code,
        "skip_tokenizer_init": True,
        **_memory_arguments(rollout, device, config.actor_rollout_ref.hybrid_engine),
        **(_picture_arguments(rollout.limit_images) if with_pictures else {}),
        **rollout.engine_kwargs.vllm,
    }
    # Always set: the model's config.json could name another precision for the engine alone.
    head_dtype = config.actor_rollout_ref.model.head_dtype or "model"
    arguments["hf_overrides"] = {**(arguments.get("hf_overrides") or {}), "head_dtype": head_dtype}
    if reported := max(rollout.largest_support, config.algorithm.rollout_correction.head_tokens):
        arguments["max_logprobs"] = reported
    if rollout.enable_rollout_routing_replay:
        arguments["enable_return_routed_experts"] = True
    on_update = config.async_training.on_update
    if on_update != "finish":
        # vLLM would label the tokens of a step that it has begun, and not processed, with the next version of
        # the weights.
        arguments["async_scheduling"] = False
    return VllmOptions(
        model_path=config.actor_rollout_ref.model.path,
        dtype=rollout.dtype,
        max_model_len=config.max_model_length,
        arguments=arguments,
        on_update=on_update,
        deterministic_steps=config.async_training.deterministic_steps,
        stages_updates=rollout.checkpoint_engine.stage_updates,
        max_concurrent=config.async_training.max_concurrent_rollouts,
        conversation=_conversation_options(config, hosts),
        exact=config.actor_rollout_ref.exact,
        pixel_limits=config.data.mm_processor_kwargs if with_pictures else None,
        adapter_rank=config.actor_rollout_ref.model.adapter_rank,
    )


def _conversation_options(config: RunConfig, hosts: Hosts | None) -> ConversationOptions | None:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if not rollout.converses:
        return None
    return ConversationOptions(
        rollout,
        config.actor_rollout_ref.model.path,
        data.trust_remote_code,
        data.apply_chat_template_kwargs,
        hosts,
    )


def _picture_arguments(limit: int | None) -> dict[str, Any]:
    """Arguments of an engine whose requests come with the pixels of their pictures."""
    return {
        "limit_mm_per_prompt": {"image": limit or _VLLM_LIMIT, "video": 0},
        # By default the tower would normalise pixels, and again those that are normalised.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,  # pixels are made here
        "skip_tokenizer_init": False,  # vLLM builds the model's processor, which needs it
    }


def _memory_arguments(rollout: RolloutConfig, device: str, shares_devices: bool) -> dict[str, Any]:
    """Arguments of the KV cache. On a CPU its size is in bytes (a fraction would be of all RAM), and the
    engine runs eagerly."""
    if device == "cpu":
        return {
            "enforce_eager": True,
            "kv_cache_memory_bytes": (rollout.kv_cache_megabytes or DEFAULT_CPU_CACHE_MEGABYTES) << 20,
        }
    arguments: dict[str, Any] = {"enforce_eager": rollout.enforce_eager}
    if shares_devices and rollout.free_cache_engine:
        arguments["enable_sleep_mode"] = True
    if rollout.kv_cache_megabytes is not None:
        return {**arguments, "kv_cache_memory_bytes": rollout.kv_cache_megabytes << 20}
    return {**arguments, "gpu_memory_utilization": rollout.gpu_memory_utilization}
