"""Keys and values a run refuses by name: dead or renamed in verl, or not built here. One row each, with what to do
instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RefusedValue:
    """A key of the schema some of whose values are not built."""

    key: str
    is_refused: Callable[[Any], bool]
    instead: str


NOT_BUILT = (
    RefusedValue(
        "algorithm.adv_estimator",
        lambda name: name in ("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"),
        "what it needs beside the samples' scores is not built yet; write algorithm.adv_estimator=rloo or grpo",
    ),
    RefusedValue(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        lambda name: name in ("clip_cov", "kl_cov"),
        "its statistics over the whole mini-batch are not built yet; write vanilla",
    ),
)

RENAMED = {
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "nothing: sequence parallelism is not built",
    "actor_rollout_ref.actor.use_torch_compile": "nothing: the FSDP worker never compiles here",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "nothing: sequence parallelism is not built",
    "actor_rollout_ref.ref.use_torch_compile": "nothing: the FSDP worker never compiles here",
    "actor_rollout_ref.ref.model.path": "actor_rollout_ref.ref.model_path",
    "critic.model.fsdp_config.param_offload": "critic.fsdp_config.param_offload",
    "critic.model.fsdp_config.optimizer_offload": "critic.fsdp_config.optimizer_offload",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.model.lora.merge": "nothing: engines always receive the adapters merged into the weights",
    "actor_rollout_ref.nccl_timeout": "trainer.ready_timeout_seconds",
    "data.return_raw_chat": "nothing: prompts always travel as chat messages",
}
"""Keys that verl knows or knew, and what to write instead."""

REFUSED_SECTIONS = {
    "reward_model": "it moved to reward.*; reward models are not built yet",
    "transfer_queue": "there is no separate data plane here",
    "global_profiler": "vendor profilers are not supported",
    "actor_rollout_ref.rollout.multi_turn": "multi-turn rollouts are not built yet",
    "actor_rollout_ref.actor.megatron": "Megatron is not supported; use FSDP (actor_rollout_ref.actor.strategy=fsdp2)",
    "algorithm.filter_groups": "dynamic sampling is not built yet",
}
"""Whole sections that are refused, and why."""
