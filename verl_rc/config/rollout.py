"""Configuration of the rollout engines and of sampling."""

from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from verl_rc.config.schema import StrictModel, follows

DEFAULT_CPU_CACHE_MEGABYTES = 256
"""Default of ``kv_cache_megabytes`` on a CPU, MiB."""


_TIES = 16
"""Room for tokens as likely as the last of top_k: in bf16 up to 5 of 258 tokens."""


class ValKwargsConfig(StrictModel):
    """``rollout.val_kwargs.*``: sampling for validation."""

    temperature: float = Field(0.0, ge=0)
    """Temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = Field(-1, ge=-1)
    """Sample from this many most likely tokens; -1: all."""
    n: int = Field(1, ge=1)
    """Samples per prompt."""
    do_sample: bool | None = None
    """False: greedy at any temperature; null: the temperature decides."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.do_sample is False or self.temperature == 0

    @model_validator(mode="after")
    def _sampling_needs_a_temperature(self) -> Self:
        if self.do_sample and self.temperature == 0:
            raise ValueError(
                "do_sample=True needs a temperature above 0, and 0, the default, is greedy; pass "
                "actor_rollout_ref.rollout.val_kwargs.temperature=<above 0>, or drop do_sample"
            )
        return self


class EngineKwargsConfig(StrictModel):
    """``rollout.engine_kwargs.*``."""

    vllm: dict[str, Any] = {}
    """Further keyword arguments of ``vllm.LLM``. Refused: those that other keys or the run set, and those
    that change the sampled distribution, such as speculative decoding."""


_ROLLOUT = "write actor_rollout_ref.rollout"
_OF_THE_RUN = "the run sets it; drop it"
_REPLICAS = (
    "there are engine devices / tensor_model_parallel_size engines, replicas all; "
    f"{_ROLLOUT}.tensor_model_parallel_size"
)
OWNED_ENGINE_ARGUMENTS = {
    **{
        name: f"{_ROLLOUT}.{name}"
        for name in (
            *(
                "dtype",
                "load_format",
                "quantization",
                "kv_cache_dtype",
                "gpu_memory_utilization",
                "enforce_eager",
            ),
            *(
                "max_model_len",
                "max_num_seqs",
                "max_num_batched_tokens",
                "enable_chunked_prefill",
                "enable_prefix_caching",
            ),
        )
    },
    "quantization_config": f"{_ROLLOUT}.quantization",
    "kv_cache_memory_bytes": f"{_ROLLOUT}.kv_cache_megabytes",
    "num_gpu_blocks_override": f"{_ROLLOUT}.kv_cache_megabytes",
    "enable_sleep_mode": f"{_ROLLOUT}.free_cache_engine",
    **dict.fromkeys(
        ("tensor_parallel_size", "nnodes", "node_rank", "master_addr", "master_port"),
        f"{_ROLLOUT}.tensor_model_parallel_size",
    ),
    "pipeline_parallel_size": _REPLICAS,
    "data_parallel_size": _REPLICAS,
    "model": "write actor_rollout_ref.model.path",
    "limit_mm_per_prompt": f"{_ROLLOUT}.limit_images",
    "mm_processor_kwargs": "write data.mm_processor_kwargs, which driver, engines and trainer follow",
    **dict.fromkeys(
        ("mm_device_do_normalize", "disable_mm_preprocessor_cache"),
        "engines get pixels that are ready, and keep none; drop it",
    ),
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
        "write actor_rollout_ref.model.lora.merge=False, for adapters in the engine",
    ),
    "trust_remote_code": "write actor_rollout_ref.model.trust_remote_code",
    **dict.fromkeys(
        (
            *("seed", "logprobs_mode", "max_logprobs", "disable_log_stats", "enable_return_routed_experts"),
            *("weight_transfer_config", "worker_extension_cls"),
        ),
        _OF_THE_RUN,
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "skip_tokenizer_init", "worker_cls", "scheduler_cls"), _OF_THE_RUN
    ),
    **dict.fromkeys(("scheduling_policy", "return_sampling_mask", "enable_trace_replay"), _OF_THE_RUN),
    **dict.fromkeys(
        (
            *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("logit_bias", "logits_processors", "watermark_config", "reasoning_config", "diffusion_config"),
        ),
        "it changes the sampled distribution; drop it",
    ),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "speculative decoding is not supported: nothing checks the distribution, the version and the kept "
        "set of a token that was accepted, nor updates the weights of a draft; drop it",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"),
        "a KV cache outside the engine would keep what the weights before an update computed; drop it",
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"),
        "a response ends at the stop tokens of the model's generation_config.json; edit that file",
    ),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision", "chat_template"),
        "engines read and write tokens, and the tokenizer is that of actor_rollout_ref.model.path; drop it",
    ),
    **dict.fromkeys(
        ("hf_config_path", "revision", "code_revision", "model_weights", "model_class_overrides"),
        "trainer and engines must build the same model; write actor_rollout_ref.model.path",
    ),
    **dict.fromkeys(("runner", "convert", "pooler_config"), "engines generate; drop it"),
    **dict.fromkeys(
        ("enable_expert_parallel", "enable_eplb", "eplb_config", "enable_elastic_ep"),
        "expert parallelism is not built; drop it",
    ),
    "prefill_context_parallel_size": _REPLICAS,
}
"""Arguments of ``vllm.LLM`` that are refused in ``engine_kwargs.vllm``, and what to do instead: memory, plan
and limit of the gap follow the keys that set them, the trainer's log-probs know no filter, and the proof of
weights and versions covers one model in one engine."""


class CheckpointEngineConfig(StrictModel):
    """``rollout.checkpoint_engine.*``: how weights are transferred to the engines."""

    backend: Literal["auto", "broadcast", "ipc"] = "auto"
    """``broadcast`` (gloo or NCCL), or ``ipc``: memory shared on the device, only with ``hybrid_engine``.
    ``auto``: ipc where trainer and engine share a GPU."""
    update_weights_bucket_megabytes: int = Field(2048, ge=1)
    """Size of a weight bucket, MiB."""
    stage_updates: bool = False
    """Receive an update beside running responses, with a second copy of the weights on the engine's device.
    For asynchronous runs."""


class SyncProofConfig(StrictModel):
    """``rollout.sync_proof.*``: checks that the engines hold the trainer's weights."""

    canary_freq: int = Field(50, ge=0)
    """Weight updates between two canary checks; 0: only at the start."""
    canary_num_prompts: int = Field(16, ge=1)
    """Prompts of one canary check, each with up to 32 generated tokens."""
    survival_freq: int = Field(0, ge=0)
    """Steps between two measurements of ``sync/update_survival``; 0: none."""
    gap_limit: float | None = Field(None, gt=0)
    """Mean |trainer - rollout log-prob| of a step or of canary tokens, nats, above which the run ends; null:
    calibrated by the first ones (``trainer.alerts.gap``)."""


class MultiTurnConfig(StrictModel):
    """``rollout.multi_turn.*``: tools that the policy may call before it answers."""

    enable: bool = False
    """Let the policy call tools (docs/tasks.md)."""
    tools: list[str] = []
    """Tools: ``calculator``, or ``module:attribute`` of a ``Tool`` of your own."""
    format: Literal["hermes", "tag"] = "hermes"
    """Syntax of a call: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen), or
    ``<tool>text</tool>`` for one tool with one argument."""
    max_assistant_turns: int | None = Field(None, ge=1)
    """Maximum number of the policy's turns; null: only tokens are limited."""
    max_user_turns: int | None = Field(None, ge=1)
    """Maximum number of tool answers; null: only tokens are limited."""
    max_parallel_calls: int = Field(1, ge=1)
    """Maximum number of calls answered in one turn."""
    max_tool_response_length: int = Field(256, ge=1)
    """Maximum length of a tool's answer, characters; a longer answer is cut and marked."""
    tool_timeout_seconds: float = Field(60.0, gt=0)
    """Time limit of one tool call, seconds."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Side of a longer answer that is cut: ``left`` keeps its end, ``right`` its beginning, ``middle`` both.
    """


class NamedEnvironmentConfig(StrictModel):
    """``rollout.environment.choices.NAME.*``."""

    name: str
    """``module:Class`` of a ``verl_rc.runtime.rollout.environment.Environment``."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""


class EnvironmentConfig(StrictModel):
    """``rollout.environment.*``: a program that answers the policy's turns and rewards them."""

    name: str | None = None
    """``module:Class`` of an ``Environment`` (docs/tasks.md); null: none."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""
    choices: dict[str, NamedEnvironmentConfig] = {}
    """Further environments by name, for rows that have one in the column ``agent_name``; other rows get
    ``environment.name``."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum number of the policy's turns; null: only tokens are limited."""
    reward: Literal["turns", "function", "sum"] = "turns"
    """Reward of an episode: those of its turns, at each turn's last token; the score of the reward function,
    at the last token; or both."""
    hosts: int = Field(0, ge=0)
    """Processes in which environments run; 0: the process of each engine, which blocking calls delay."""
    step_seconds: float = Field(60.0, gt=0)
    """Time limit of one call of an environment, seconds."""
    max_state_megabytes: float = Field(16.0, gt=0)
    """Largest state of an episode, MiB, which checkpoints hold."""


class RolloutConfig(StrictModel):
    """``actor_rollout_ref.rollout.*``."""

    name: Literal["vllm"] = "vllm"
    """The engine."""
    n: int = Field(1, ge=1)
    """Samples per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; engine and trainer divide logits by it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability. The trainer mirrors this filter and the
    next two."""
    top_k: int = Field(-1, ge=-1)
    """Sample from this many most likely tokens, ties included; -1 or 0: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the largest probability; 0: all."""
    max_support: int | None = Field(None, ge=1)
    """Largest support (tokens that the filter leaves) that is recorded; a token with a larger one leaves the
    loss. null: top_k + 16; needed with a filter without top_k."""
    enable_rollout_routing_replay: bool = False
    """For models with experts: the actor takes the experts that the engine recorded for each token."""
    ignore_eos: bool = False
    """Continue generation after the EOS token."""
    tensor_model_parallel_size: int = Field(2, ge=1)
    """Devices of one engine. An engine with more than ``n_gpus_per_node`` takes whole nodes."""
    nnodes: int = follows("trainer.nnodes", ge=1)
    """Nodes with engines."""
    n_gpus_per_node: int = follows("trainer.n_gpus_per_node", ge=1)
    """Engine devices per node. Engines = devices / tensor_model_parallel_size."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the engine's weights and activations."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Weights of an engine until the trainer's arrive: ``auto`` and ``safetensors`` read the model's files,
    ``dummy`` skips that."""
    quantization: str | None = None
    """Online quantisation of the engine's weights, e.g. ``fp8_per_channel``; null: none."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Precision of the KV cache; ``auto``: that of the engine. A CPU rounds to fp8 toward zero, which widens
    the gap."""
    kv_cache_megabytes: int | None = Field(None, ge=1)
    """Size of the KV cache, MiB; null: 256 on a CPU, from ``gpu_memory_utilization`` on a GPU."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine takes. Without effect on a CPU."""
    free_cache_engine: bool = True
    """Free the memory of an engine on the trainer's GPU while the trainer computes. Without effect on a CPU.
    """
    enforce_eager: bool = False
    """Do not capture CUDA graphs; always so on a CPU."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum tokens of prompt and response; null: data.max_prompt_length + data.max_response_length."""
    max_num_seqs: int = Field(256, ge=1)
    """Maximum number of sequences that one engine generates at once."""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """Maximum tokens of one engine iteration."""
    enable_chunked_prefill: bool = True
    """Split long prefills and mix them with decoding. Without effect on a CPU."""
    limit_images: int | None = Field(None, ge=1)
    """Most pictures of a prompt for which an engine has room; null: as many as fit."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prefixes."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill log-prob micro-batches by tokens."""
    log_prob_max_token_len_per_gpu: int = follows("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ge=1)
    """Tokens of a log-prob micro-batch."""
    log_prob_micro_batch_size_per_gpu: int | None = follows(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", ge=1
    )
    """Rows of a log-prob micro-batch."""
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    """Sampling for validation."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Tools."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """An environment."""
    allow_special_tokens: bool = False
    """Let texts of tools and environments become special tokens, such as ``<|im_end|>``."""
    engine_kwargs: EngineKwargsConfig = EngineKwargsConfig()
    """Further arguments of the engine."""
    checkpoint_engine: CheckpointEngineConfig = CheckpointEngineConfig()
    """Transfer of weights."""
    sync_proof: SyncProofConfig = SyncProofConfig()
    """Proof that weights arrive."""

    @property
    def has_filter(self) -> bool:
        """Whether training rollouts are drawn from a part of the tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def nodes_per_engine(self) -> int:
        """Nodes of one engine. One with more devices than a node takes whole nodes."""
        return max(1, self.tensor_model_parallel_size // self.n_gpus_per_node)

    @property
    def devices_of_an_engine_per_node(self) -> int:
        """Devices of an engine on each of its nodes."""
        return self.tensor_model_parallel_size // self.nodes_per_engine

    @property
    def largest_support(self) -> int:
        """Size of the largest support that is recorded; 0 without a filter."""
        return (self.max_support or self.top_k + _TIES) if self.has_filter else 0

    @property
    def converses(self) -> bool:
        """Whether samples take turns with tools or an environment."""
        return self.multi_turn.enable or self.environment.name is not None
