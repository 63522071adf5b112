"""How a vLLM engine is built, from the configuration of a run."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from verl_rc.config.rollout import DEFAULT_CPU_CACHE_MEGABYTES, RolloutConfig
from verl_rc.config.run import RunConfig
from verl_rc.exact import ENGINE_ARGUMENTS
from verl_rc.rollout.environment_host import Hosts
from verl_rc.rollout.sampling import ConversationOptions

OnUpdate = Literal["finish", "recompute", "keep"]
"""What a weight update does to running samples: it waits for their end; or they go on with the new weights,
after their tokens so far are computed again, or behind the KV cache of the old weights. Samples with priority
always end first."""


@dataclass(frozen=True)
class VllmOptions:
    """How the engine is built, see ``EngineOptions``."""

    worker: ClassVar[str] = "verl_rc.rollout.vllm.engine:VllmEngine"
    model_path: str
    dtype: str
    max_model_len: int
    """Tokens of prompt and response together."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``vllm.LLM``."""
    on_update: OnUpdate = "finish"
    deterministic_steps: int | None = None
    """Steps that samples without priority are decoded by one version of the weights, after ``resume``; None:
    no limit."""
    stages_updates: bool = False
    """A broadcast update is received beside the engine's steps and loaded between two of them."""
    max_concurrent: int | None = None
    """Samples without priority that may have begun and not ended; None: no limit."""
    conversation: ConversationOptions | None = None
    """What answers the turns of samples; None: nothing does."""
    exact: bool = False
    """The engine computes with the operations of exact mode."""
    adapter_rank: int = 0
    """Rank of the LoRA adapter that it applies beside its weights; 0: none, adapters come merged."""

    @property
    def deterministic(self) -> bool:
        """See ``EngineOptions``: the steps of each version are counted."""
        return self.deterministic_steps is not None


def engine_options(config: RunConfig, device: str, hosts: Hosts | None = None) -> VllmOptions:
    """The keyword arguments of ``vllm.LLM`` that a configuration means; see ``rollout.engine``."""
    rollout = config.actor_rollout_ref.rollout
    arguments: dict[str, Any] = {
        "load_format": rollout.load_format,
        "quantization": rollout.quantization,
        "kv_cache_dtype": rollout.kv_cache_dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "uni" if rollout.tensor_model_parallel_size == 1 else "mp",
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, config.max_model_length),
        # a request whose prompt is cut has its random generator set back, which vLLM cannot do on a CPU
        "enable_chunked_prefill": rollout.enable_chunked_prefill and device != "cpu",
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "seed": rollout.seed,
        "trust_remote_code": config.actor_rollout_ref.model.trust_remote_code,
        "skip_tokenizer_init": True,
        **_memory_arguments(rollout, device, config.actor_rollout_ref.hybrid_engine),
        **rollout.engine_kwargs.vllm,
    }
    # Always said: the model's own config.json could name another precision for the engine alone.
    head_dtype = config.actor_rollout_ref.model.head_dtype or "model"
    arguments["hf_overrides"] = {**(arguments.get("hf_overrides") or {}), "head_dtype": head_dtype}
    if rollout.largest_kept_set:
        arguments["max_logprobs"] = rollout.largest_kept_set
    if rollout.enable_rollout_routing_replay:
        arguments["enable_return_routed_experts"] = True
    exact = config.actor_rollout_ref.exact
    if exact:
        arguments |= ENGINE_ARGUMENTS[device]
    on_update = config.async_training.on_update
    if on_update != "finish":
        # vLLM would give the tokens of a step that it has begun, and not processed, the version of the
        # weights that come next.
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
        exact=exact,
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


def _memory_arguments(rollout: RolloutConfig, device: str, shares_devices: bool) -> dict[str, Any]:
    """On a CPU the cache's size is given in bytes (a fraction would be one of all RAM) and the engine runs
    eagerly."""
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
