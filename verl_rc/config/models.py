"""Configuration of the models: the trained model, the updates of actor and critic, and the reference
policy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_rc.config.algorithms import LossAggregation, PolicyLossOptions, RatioOptions
from verl_rc.config.schema import StrictModel, UserPath, follows

ENGINE_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters for which an engine can make room (vLLM 0.32)."""


def adapter_room(rank: int) -> int:
    """The rank for which an engine makes room to hold adapters of ``rank``; 0 for none."""
    return next(room for room in (0, *ENGINE_ADAPTER_RANKS) if room >= rank)


class LoraConfig(StrictModel):
    """``model.lora.*``."""

    merge: bool = True
    """True: engines get weights with the adapters merged in. False: they get the weights once, then only
    adapters; sampling takes longer."""


_SAVED_ADAPTERS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
}
"""Keys, and what PEFT calls them in ``adapter_config.json``."""
_HARMLESS = (
    *_SAVED_ADAPTERS.values(),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "init_lora_weights", "layers_pattern", "megatron_core"),
    *("qalora_group_size", "ensure_weight_tying"),
)
"""Settings there that do not change what an adapter computes; any other one must be off."""


class ModelConfig(StrictModel):
    """``actor_rollout_ref.model.*``."""

    path: UserPath
    """Hugging Face model folder or hub id."""
    use_remove_padding: bool = True
    """Pack the real tokens of a micro-batch instead of padding every row to the longest."""
    share_prefixes: Literal["auto", True, False] = "auto"
    """Compute what rows of a micro-batch have in common from the first token on once; in the actor not beside
    replayed experts. auto: where rows are packed."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, a third more time. Null: true on GPUs, false
    on a CPU."""
    enable_activation_offload: bool = False
    """Keep the inputs of recomputed layers in pinned host memory: less memory, more time. Without effect on a
    CPU. Never run on a GPU."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; 0 trains all parameters. With adapters the reference policy is the actor without
    them."""
    lora_alpha: int = Field(16, ge=1)
    """Scale of the adapters, which are multiplied by lora_alpha / lora_rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: names, a regular expression, or ``all-linear`` (every linear layer except
    the output)."""
    exclude_modules: str | list[str] | None = None
    """Modules without adapters: names or a regular expression."""
    lora_adapter_path: UserPath | None = None
    """Folder of PEFT's LoRA adapters that training starts from; it says their rank, alpha and modules. Null:
    new ones, which begin at 0."""
    lora: LoraConfig = LoraConfig()
    """Transfer of adapters to the engines."""
    head_dtype: Literal["float32"] | None = None
    """Precision in which actor, reference and engines compute logits. Null: the ``dtype`` of each."""

    @model_validator(mode="before")
    @classmethod
    def _read_adapters(cls, source: Any) -> Any:
        """Fill in what the adapters to start from are."""
        path = source.get("lora_adapter_path") if isinstance(source, Mapping) else None
        if path is None:
            return source
        file = Path(str(path)).expanduser() / "adapter_config.json"
        try:
            saved = dict(json.loads(file.read_text(encoding="utf-8")))
            adapters = {key: saved.get(name) for key, name in _SAVED_ADAPTERS.items()}
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"lora_adapter_path must be a folder of LoRA adapters that PEFT saved, but {file} cannot be "
                f"read ({type(error).__name__}: {error})"
            ) from error
        unlike = [
            f"{name}={value!r}"
            for name, value in saved.items()
            if name not in _HARMLESS and value not in (None, False, "none", [], {})
        ]
        for name, usual in (("peft_type", ("LORA",)), ("init_lora_weights", (True, False, "gaussian"))):
            if saved.get(name, usual[0]) not in usual:
                unlike.append(f"{name}={saved[name]!r}")
        if unlike:
            raise ValueError(
                f"lora_adapter_path must have plain LoRA adapters, but {file} has {', '.join(unlike)}; merge "
                "them into a model folder and give that as path"
            )
        for key, value in adapters.items():
            if key in source and _in_order(source[key]) != _in_order(value):
                raise ValueError(
                    f"{key} must be that of lora_adapter_path, {value!r}, got {source[key]!r}; drop it"
                )
        return {**source, **adapters}

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters that engines apply. 0 without adapters, or with merged ones."""
        return 0 if self.lora.merge else self.lora_rank


def _in_order(value: object) -> object:
    """Names of modules in one order: PEFT writes a set."""
    return sorted(map(str, value)) if isinstance(value, (list, tuple)) else value


def model_source(path: str) -> str:
    """``path`` for transformers: ``~`` is expanded in the path of a folder, a hub id is left as it is."""
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


Precision = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def torch_name(precision: str) -> str:
    """Torch's own name of a precision: ``float32``, ``bfloat16`` or ``float16``."""
    return _SHORT_NAMES.get(precision, precision)


KlKind = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
]
"""Estimators of a divergence from sampled log-probs; formulas at ``verl_rc.tensor_ops.kl_penalty``."""


class OptimConfig(StrictModel):
    """``*.optim.*``: AdamW and its learning-rate schedule, which advances once per training step."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.999], min_length=2, max_length=2)
    """Decay rates of AdamW's moments."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest gradient norm over all parameters; larger gradients are scaled down."""
    lr_warmup_steps: int = Field(-1, ge=-1)
    """Training steps of linear warm-up; -1: ``lr_warmup_steps_ratio`` decides."""
    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1)
    """Warm-up as a share of all training steps."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Rate at the last step as a share of the peak (``linear``, ``cosine``)."""
    num_cycles: float = Field(0.5, gt=0)
    """Periods of the cosine; 0.5 falls once from the peak to the minimum."""


class FsdpConfig(StrictModel):
    """``*.fsdp_config.*``: sharding and precision."""

    fsdp_size: int = Field(-1, ge=-1)
    """Neighbouring ranks that share one copy of weights and moments, a divisor of their number; -1: all."""
    model_dtype: Precision = "fp32"
    """Precision of the master weights; no float16 where a model learns."""
    dtype: Precision = "bfloat16"
    """Precision of forward and backward. Training in float16 scales the loss, and needs a GPU or a CPU with
    float16 products."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward: less memory, one more all-gather."""
    param_offload: bool = False
    """Keep the weights in host memory while the model does not compute. Without effect on a CPU."""
    ulysses_sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share the tokens, and in attention the heads, of each micro-batch, which then is that many
    times as large. It divides the ranks and the heads."""

    def ranks_per_copy(self, ranks: int) -> int:
        """Ranks of ``ranks`` that share one copy of the weights."""
        return self.fsdp_size if 0 < self.fsdp_size < ranks else ranks


class LearnerFsdpConfig(FsdpConfig):
    """``*.fsdp_config.*`` of a model that learns."""

    optimizer_offload: bool = False
    """Keep the optimizer's moments in host memory while the model does not compute. Without effect on a CPU.
    """
    use_no_sync_for_gradient_accumulation: bool | None = None
    """True: gradients are reduced once per mini-batch, and each rank holds them whole, 4 bytes per weight.
    False: after every micro-batch. null: True where the estimated memory allows it."""


class FrozenFsdpConfig(FsdpConfig):
    """``*.fsdp_config.*`` of a policy that only scores."""

    model_dtype: Precision = "fp32"
    """Precision of its weights."""
    ulysses_sequence_parallel_size: int = follows(
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", ge=1
    )
    """Ranks that share the tokens of each micro-batch; it must divide the ranks and the attention heads."""


class PolicyLossConfig(PolicyLossOptions):
    """``actor.policy_loss.*``."""

    loss_mode: str = "vanilla"
    """Policy loss: a name of the table of policy losses (``vanilla`` is PPO clip with dual clip), or
    ``module:function`` for one of your own."""


class CheckpointConfig(StrictModel):
    """``actor.checkpoint.*``: what is written every ``trainer.save_freq`` steps."""

    async_save: bool = False
    """Write checkpoints while the next steps run, from a copy in host memory (12 bytes per parameter over all
    ranks)."""


class ActorConfig(RatioOptions):
    """``actor_rollout_ref.actor.*``."""

    ppo_mini_batch_size: int = Field(256, ge=1)
    """Prompts per optimizer step, over all ranks."""
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Rows per forward and backward on one rank; needed unless ``use_dynamic_bsz``."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead of rows."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens (prompt and response) of one micro-batch on one rank, with ``use_dynamic_bsz``. What rows share
    counts once."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the batch in each step."""
    shuffle: bool = False
    """Shuffle the rows in each epoch."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How token losses become one number."""
    loss_scale_factor: int | None = follows("data.max_response_length", ge=1)
    """Divisor of ``seq-mean-token-sum-norm``."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term against the reference policy to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of the KL term."""
    kl_loss_type: KlKind = "low_var_kl"
    """Estimator of the KL term. With a ``+`` its gradient is that of k2, which is the gradient of the KL."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Choice of the policy loss."""
    freeze_vision_tower: bool = True
    """Train no weight of the tower that makes tokens of pictures, in a model that has one."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    fsdp_config: LearnerFsdpConfig = LearnerFsdpConfig()
    """Sharding and precision."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Form of its checkpoints."""

    @model_validator(mode="after")
    def _some_micro_batch_limit(self) -> "ActorConfig":
        if not self.use_dynamic_bsz and self.ppo_micro_batch_size_per_gpu is None:
            raise ValueError(
                "a micro-batch needs a limit: pass "
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=<rows>, or "
                "actor_rollout_ref.actor.use_dynamic_bsz=True with ppo_max_token_len_per_gpu=<tokens>; "
                "neither was given"
            )
        return self


class CriticModelConfig(StrictModel):
    """``critic.model.*``: the transformer below the value head."""

    path: UserPath = follows("actor_rollout_ref.model.path")
    """Hugging Face model folder or hub id."""
    enable_gradient_checkpointing: bool | None = follows(
        "actor_rollout_ref.model.enable_gradient_checkpointing"
    )
    """Recompute activations in the backward pass."""
    enable_activation_offload: bool = follows("actor_rollout_ref.model.enable_activation_offload")
    """Keep the inputs of recomputed layers in host memory."""
    trust_remote_code: bool = follows("actor_rollout_ref.model.trust_remote_code")
    """Run code that comes with the model."""


def recomputes_activations(model: ModelConfig | CriticModelConfig, on_gpus: bool) -> bool:
    """Whether the backward pass of a model computes activations anew."""
    return on_gpus if model.enable_gradient_checkpointing is None else model.enable_gradient_checkpointing


class CriticOptimConfig(OptimConfig):
    """``critic.optim.*``."""

    lr: float = Field(1e-5, ge=0)
    """Peak learning rate."""


class CriticConfig(StrictModel):
    """``critic.*``. A key that is null takes the actor's value."""

    enable: bool | None = None
    """Train a critic; null: only when the advantage estimator needs values (``gae``)."""
    model: CriticModelConfig = CriticModelConfig()
    """The transformer below the value head."""
    optim: CriticOptimConfig = CriticOptimConfig()
    """Optimizer."""
    fsdp_config: LearnerFsdpConfig = LearnerFsdpConfig()
    """Sharding and precision."""
    ppo_mini_batch_size: int = follows("actor_rollout_ref.actor.ppo_mini_batch_size", ge=1)
    """Prompts per optimizer step, over all ranks."""
    ppo_epochs: int = follows("actor_rollout_ref.actor.ppo_epochs", ge=1)
    """Passes over the batch in each step."""
    shuffle: bool = follows("actor_rollout_ref.actor.shuffle")
    """Draw a new order of rows in each pass."""
    use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill micro-batches by tokens."""
    ppo_max_token_len_per_gpu: int = Field(32768, ge=1)
    """Tokens of one micro-batch on one rank, with ``use_dynamic_bsz``."""
    ppo_micro_batch_size_per_gpu: int | None = follows(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", ge=1
    )
    """Rows of one micro-batch on one rank without ``use_dynamic_bsz``."""
    loss_agg_mode: LossAggregation = follows("actor_rollout_ref.actor.loss_agg_mode")
    """How token losses become one number."""
    cliprange_value: float = Field(0.5, gt=0)
    """Distance from the old value above which a value's loss is clipped, in units of reward."""


class ReferenceConfig(StrictModel):
    """``actor_rollout_ref.ref.*``. With LoRA the reference is the actor without its adapters, and needs no
    model of its own. A teacher (``distillation``) is sharded and scores by the same keys, but for the path.
    """

    model_path: UserPath = follows("actor_rollout_ref.model.path")
    """Hugging Face model folder or hub id."""
    sync_freq: int = Field(0, ge=0)
    """Steps between refreshes of the reference policy, which makes it the actor of that step; 0: never."""
    fsdp_config: FrozenFsdpConfig = FrozenFsdpConfig()
    """Sharding and precision."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill log-prob micro-batches by tokens."""
    log_prob_max_token_len_per_gpu: int = follows("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ge=1)
    """Tokens of a log-prob micro-batch."""
    log_prob_micro_batch_size_per_gpu: int | None = follows(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", ge=1
    )
    """Rows of a log-prob micro-batch."""


@dataclass(frozen=True)
class FrozenPolicy:
    """A frozen policy of a run that has a model of its own."""

    path_key: str
    """The key of ``model_path``."""
    model_path: str
    config: ReferenceConfig
