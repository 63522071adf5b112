"""Requests to an engine: how it is built, sampling parameters, and a seed for every request."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_rc.config.rollout import (
    DEFAULT_CPU_CACHE_MEGABYTES,
    MultiTurnConfig,
    RolloutConfig,
    ValKwargsConfig,
)
from verl_rc.config.run import RunConfig
from verl_rc.data.parts import Answer, Part

OnUpdate = Literal["finish", "recompute", "keep"]
"""What a weight update does to running samples: it waits for their end; or they go on with the new weights,
after their tokens so far are computed again, or behind the KV cache of the old weights. Samples with priority
always end first."""


@dataclass(frozen=True)
class ConversationOptions:
    """What an engine needs to let samples call tools between their turns."""

    config: MultiTurnConfig
    tokenizer_path: str
    trust_remote_code: bool
    chat_template_kwargs: Mapping[str, Any]
    """``data.apply_chat_template_kwargs``."""


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is built."""

    model_path: str
    dtype: str
    max_model_len: int
    """Tokens of prompt and response together."""
    response_width: int
    """Padded width R of returned responses, tokens."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``vllm.LLM``."""
    on_update: OnUpdate = "finish"
    deterministic_steps: int | None = None
    """Steps that samples without priority are decoded by one version of the weights, see
    ``RolloutEngine.begin_steps``; None: no limit."""
    stages_updates: bool = False
    """A broadcast update is received beside the engine's steps and loaded between two of them."""
    max_concurrent: int | None = None
    """Samples without priority that may have begun and not ended; None: no limit."""
    conversation: ConversationOptions | None = None
    """How samples call tools; None: they call none."""


def max_model_length(config: RunConfig) -> int:
    """Tokens of prompt and response that an engine must hold."""
    return config.actor_rollout_ref.rollout.max_model_len or config.longest_sequence


def engine_options(config: RunConfig, device: str) -> EngineOptions:
    """The keyword arguments of ``vllm.LLM`` that a configuration means on ``device``."""
    rollout = config.actor_rollout_ref.rollout
    arguments: dict[str, Any] = {
        "load_format": rollout.load_format,
        "quantization": rollout.quantization,
        "kv_cache_dtype": rollout.kv_cache_dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "uni" if rollout.tensor_model_parallel_size == 1 else "mp",
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_model_length(config)),
        # a request whose prompt is cut has its random generator set back, which vLLM cannot do on a CPU
        "enable_chunked_prefill": rollout.enable_chunked_prefill and device != "cpu",
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "seed": rollout.seed,
        "trust_remote_code": config.actor_rollout_ref.model.trust_remote_code,
        "skip_tokenizer_init": True,
        **_memory_arguments(rollout, device, config.actor_rollout_ref.hybrid_engine),
        **rollout.engine_kwargs.vllm,
    }
    on_update = config.async_training.on_update
    if on_update != "finish":
        # vLLM would give the tokens of a step that it has begun, and not processed, the version of the
        # weights that come next.
        arguments["async_scheduling"] = False
    return EngineOptions(
        model_path=config.actor_rollout_ref.model.path,
        dtype=rollout.dtype,
        max_model_len=max_model_length(config),
        response_width=config.data.max_response_length,
        arguments=arguments,
        on_update=on_update,
        deterministic_steps=config.async_training.deterministic_steps,
        stages_updates=rollout.checkpoint_engine.stage_updates,
        max_concurrent=config.async_training.max_concurrent_rollouts,
        conversation=_conversation_options(config),
    )


def _conversation_options(config: RunConfig) -> ConversationOptions | None:
    multi_turn, data = config.actor_rollout_ref.rollout.multi_turn, config.data
    if not multi_turn.enable:
        return None
    return ConversationOptions(
        multi_turn,
        config.actor_rollout_ref.model.path,
        data.trust_remote_code,
        data.apply_chat_template_kwargs,
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


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; the same for every request of one call."""

    temperature: float
    """Logits are divided by it; 0 is greedy."""
    top_p: float
    top_k: int
    """-1: all tokens."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False

    @classmethod
    def for_training(cls, rollout: RolloutConfig, stop_token_ids: tuple[int, ...]) -> "SamplingOptions":
        """Options of training rollouts."""
        return cls(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.response_length,
            stop_token_ids,
            rollout.ignore_eos,
        )

    @classmethod
    def for_validation(
        cls, validation: ValKwargsConfig, max_tokens: int, stop_token_ids: tuple[int, ...]
    ) -> "SamplingOptions":
        """Options of validation rollouts; ``do_sample=False`` is greedy at any temperature."""
        temperature = 0.0 if validation.do_sample is False else validation.temperature
        return cls(temperature, validation.top_p, validation.top_k, max_tokens, stop_token_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample."""

    prompt_token_ids: list[int]
    seed: int
    """Seed of the first part; see ``Response.seed``."""
    max_tokens: int | None = None
    """Limit of the whole response, tokens; None: that of the sampling options."""
    parts: Sequence[Part | Answer] = ()
    """What there is of the response already: it continues behind these tokens."""
    tool_calls: int = 0
    """Calls that tools answered in ``parts``."""

    def limit(self, options: SamplingOptions) -> int:
        """Longest response, tokens, with those of tool answers."""
        return options.max_tokens if self.max_tokens is None else self.max_tokens


def request_seed(identity: Mapping[str, int]) -> int:
    """A 63-bit seed that depends on every entry of ``identity`` (run seed, step, epoch, row, sample) and on
    nothing else.

    So on a CPU a sample does not depend on which engine draws it, in which batch, or after which restart. On
    a GPU the last bits of a probability depend on the batch, unless vLLM's kernels are told otherwise
    (``VLLM_BATCH_INVARIANT=1``).
    """
    # Sorted, and hashed by blake2b: hash() of a string differs from process to process. Shifted, so
    # that it fits a signed 64-bit integer.
    text = ",".join(f"{name}={identity[name]}" for name in sorted(identity))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def turn_seed(first: int, turn: int) -> int:
    """The seed of the policy's turn ``turn`` in a conversation, from 0; ``first`` is that of the first
    turn."""
    return first if turn == 0 else request_seed({"sample": first, "turn": turn})


def part_seed(first: int, offset: int) -> int:
    """The seed of the part of a turn that begins at its token ``offset``; ``first`` is that of the turn's
    first part."""
    return first if offset == 0 else request_seed({"seed": first, "offset": offset})
