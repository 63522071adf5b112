"""Why verl's keys of trainer ranks and models are refused: leaves that several sections have."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """The reason for refusing a key, or everything below it."""

    reason: str
    """What holds here and what to write instead; the message puts the key before it and a full stop after it.
    """
    accepted: tuple[Any, ...] = ()
    """Accepted values, which match the behaviour here; those of a section apply to each of its leaves."""
    switch: str | None = None
    """The key that enables the section; while it is off, the other leaves of the section have no effect and
    are accepted."""


OFF = (False, None)
NOTHING: tuple[Any, ...] = (None, "", [], {})
EITHER = (True, False, None)
_FSDP_NAMES = ("fsdp", "fsdp2", None)
_WHOLE_CHECKPOINT = (["model", "optimizer", "extra"], None)
PROFILER = "vendor profilers are not supported; write global_profiler.tool=torch and .steps, or drop it"
MTP = "prediction of several tokens is not supported; drop it"
MEGATRON_LORA = (
    "it belongs to Megatron; adapters are actor_rollout_ref.model.lora_rank, .lora_alpha, .target_modules "
    "and .exclude_modules"
)
QAT = "training for quantised weights is not built; drop it"
GLOBAL_BATCH = "it counts rows of all ranks; write {section}.{key}_per_gpu=<that number / ranks>"
IMAGES = (
    "images, video and audio are not read from there (a model with a vision tower reads the pictures of the "
    "column data.image_key); drop it"
)
"""verl's own names of their columns may be given: a file that has such a column is refused."""

FSDP_LEAVES = {
    "strategy": Refusal(
        "Megatron, VeOmni, TorchTitan and the like are not supported; write fsdp2", _FSDP_NAMES
    ),
    "wrap_policy": Refusal("every transformer layer is a unit of FSDP2; drop it", (0, *NOTHING)),
    "offload_policy": Refusal(
        "weights rest in host memory between uses with param_offload=True, moments with "
        "optimizer_offload=True; write those",
        OFF,
    ),
    "grad_offload": Refusal("gradients never outlive the optimizer step; drop it", OFF),
    "forward_prefetch": Refusal("FSDP2 gathers the next layer while one computes, always; drop it", EITHER),
    "use_orig_params": Refusal("FSDP2 has no flattened parameters; drop it", EITHER),
    "seed": Refusal("all random numbers follow trainer.seed; write that", (42,)),
    "full_determinism": Refusal("it is not built; write False", OFF),
    "entropy_from_logits_with_chunking": Refusal("entropy is always computed in chunks; drop it", EITHER),
    "entropy_from_logits_chunk_size": Refusal(
        "the size of chunks follows the vocabulary; drop it", (2048, None)
    ),
    "entropy_checkpointing": Refusal(
        "entropy is always computed again in the backward pass; drop it", EITHER
    ),
    "use_torch_compile": Refusal("models run uncompiled, with the same results; drop it", EITHER),
    "pad_to_length": Refusal("micro-batches are never padded further than they need; drop it", OFF),
    "pad_to_length_bucket": Refusal(
        "micro-batches are never padded further than they need; drop it", (1024, None)
    ),
    "forward_only": Refusal("the role of a worker decides it; drop it", EITHER),
    "mixed_precision": Refusal(
        "forward and backward run in dtype, gradients are reduced in fp32; write dtype", NOTHING
    ),
    "qat": Refusal(QAT, OFF, switch="enable"),
    "turbo_config": Refusal("FSDP turbo is not supported; drop it"),
}
"""Leaves of every ``fsdp_config``."""

WORKER_LEAVES = {
    "strategy": FSDP_LEAVES["strategy"],
    "optim.optimizer": Refusal("the only optimizer is torch's AdamW; write AdamW", ("AdamW", None)),
    "megatron": Refusal("Megatron is not supported; use FSDP, strategy=fsdp2"),
    "veomni": Refusal("VeOmni is not supported; use FSDP, strategy=fsdp2"),
    "torchtitan": Refusal("TorchTitan is not supported; use FSDP, strategy=fsdp2"),
    "automodel": Refusal("Automodel is not supported; use FSDP, strategy=fsdp2"),
    "qat": Refusal(QAT, OFF, switch="enable"),
    "data_loader_seed": Refusal("the order of mini-batches follows trainer.seed; write that", (42, 1, None)),
    "entropy_from_logits_with_chunking": FSDP_LEAVES["entropy_from_logits_with_chunking"],
    "entropy_from_logits_chunk_size": FSDP_LEAVES["entropy_from_logits_chunk_size"],
    "entropy_checkpointing": FSDP_LEAVES["entropy_checkpointing"],
    "use_torch_compile": FSDP_LEAVES["use_torch_compile"],
    "pad_to_length": FSDP_LEAVES["pad_to_length"],
    "checkpoint.save_contents": Refusal(
        "a checkpoint always holds all that resuming needs; drop it, and export a model with verl-rc export",
        _WHOLE_CHECKPOINT,
    ),
    "checkpoint.load_contents": Refusal(
        "a run resumes with all that its checkpoint holds; drop it", _WHOLE_CHECKPOINT
    ),
    "checkpoint.strict": Refusal(
        "a checkpoint that does not fit is always refused; write True", (True, None)
    ),
    "checkpoint.mbridge_config": Refusal("it belongs to Megatron; drop it", NOTHING),
    "optim.optimizer_impl": Refusal(
        "the only optimizer is torch's AdamW; write torch.optim", ("torch.optim", None)
    ),
    "optim.total_training_steps": Refusal(
        "the schedule is as long as the run; write trainer.total_training_steps", (-1, None)
    ),
    "optim.zero_indexed_step": Refusal(
        "a warm-up of N steps begins with 1/(N+1) of the peak; drop it", (True, None)
    ),
    "optim.override_optimizer_config": Refusal(
        "further arguments are not built; write optim.betas and .weight_decay", NOTHING
    ),
}
"""Leaves of the sections of actor, reference and critic."""

PROFILER_LEAVES = {
    "tool": Refusal(PROFILER, ("torch", None)),
    "save_path": Refusal("write global_profiler.save_path", ("outputs/profile", None)),
    "tool_config": Refusal("it belongs to other profilers than torch's; drop it", OFF),
    "tool_config.torch.contents": Refusal(
        "a trace has what the CPU and the GPU did, and when; write ['cpu','cuda']",
        (["cpu", "cuda"], ["cuda", "cpu"], *NOTHING),
    ),
    "tool_config.torch.discrete": Refusal("a step is recorded whole; write False", OFF),
    "tool_config.torch.schedule": Refusal("a step is recorded whole; drop it", (0, None)),
    **dict.fromkeys(
        ("relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"),
        Refusal("traces lie in global_profiler.save_path; drop it", (*OFF, [])),
    ),
}
"""Leaves of every section ``profiler``."""

MODEL_LEAVES = {
    "hf_config_path": Refusal("a model folder holds its configuration; write model.path alone", NOTHING),
    "tokenizer_path": Refusal(
        "a model folder holds its tokenizer; put it there, and write model.path alone", NOTHING
    ),
    "use_shm": Refusal("weights are read where they lie; drop it", EITHER),
    "custom_chat_template": Refusal(
        "the tokenizer's own template is used; write it into tokenizer_config.json", NOTHING
    ),
    "external_lib": Refusal(
        "nothing is imported by name; give losses, estimators and tools as module:attribute", NOTHING
    ),
    "override_config": Refusal(
        "a model's configuration is used as it is; edit config.json in its folder", NOTHING
    ),
    "use_liger": Refusal("Liger's kernels are not built; drop it", OFF),
    "use_fused_kernels": Refusal("log-probs are always fused with the output layer; drop it", EITHER),
    "fused_kernel_options": Refusal("log-probs are fused in one way; drop it", ("torch", "triton", *NOTHING)),
    "tiled_mlp": Refusal(
        "it is not built; write enabled=False, and lower ppo_max_token_len_per_gpu", OFF, switch="enabled"
    ),
    "mtp": Refusal(MTP, OFF, switch="enable"),
}
"""Leaves of the sections of a model."""

LORA_LEAVES = {
    "type": Refusal("adapters are LoRA; drop it", ("lora",)),
    "dropout": Refusal("adapters have no dropout; write 0.0", (0.0,)),
    "dtype": Refusal(
        "adapters have the precision of the master weights, fsdp_config.model_dtype; drop it", (None,)
    ),
    "adapter_path": Refusal("write actor_rollout_ref.model.lora_adapter_path", NOTHING),
}
"""Leaves of ``model.lora`` that are not Megatron's alone."""

MEGATRON_LORA_LEAVES = (
    *("rank", "alpha", "target_modules", "exclude_modules", "dropout_position", "lora_A_init_method"),
    *("lora_B_init_method", "a2a_experimental"),
    *("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
)
"""Megatron's leaves of the policy's ``model.lora``, in which ``merge`` is a key of this schema."""
