"""WHAT a run is: the one tree, resolved and frozen."""

import copy
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, model_validator
from pydantic_core import PydanticUndefined

from verl_rc.config.actor import ActorConfig
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.base import StrictModel
from verl_rc.config.critic import CriticConfig
from verl_rc.config.data import DataConfig
from verl_rc.config.model import ModelConfig
from verl_rc.config.reference import ReferenceConfig
from verl_rc.config.reward import RewardConfig
from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.trainer import RayKwargsConfig, TrainerConfig

# Values that follow another key unless given: (key, the key it follows).
FALLBACKS = (
    ("actor_rollout_ref.rollout.response_length", "data.max_response_length"),
    ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
    ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.rollout.nnodes", "trainer.nnodes"),
    ("actor_rollout_ref.rollout.n_gpus_per_node", "trainer.n_gpus_per_node"),
    ("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio"),
    ("actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.actor.clip_ratio"),
    ("actor_rollout_ref.actor.loss_scale_factor", "data.max_response_length"),
    ("data.seed", "trainer.seed"),
    ("data.gen_batch_size", "data.train_batch_size"),
    ("reward.reward_kwargs.max_resp_len", "data.max_response_length"),
    ("actor_rollout_ref.ref.model_path", "actor_rollout_ref.model.path"),
    ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("critic.model.path", "actor_rollout_ref.model.path"),
    ("critic.model.use_remove_padding", "actor_rollout_ref.model.use_remove_padding"),
    ("critic.model.enable_gradient_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"),
    ("critic.model.trust_remote_code", "actor_rollout_ref.model.trust_remote_code"),
    ("critic.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    ("critic.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
    ("critic.shuffle", "actor_rollout_ref.actor.shuffle"),
    ("critic.use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
    ("critic.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("critic.checkpoint.async_save", "actor_rollout_ref.actor.checkpoint.async_save"),
    ("critic.loss_agg_mode", "actor_rollout_ref.actor.loss_agg_mode"),
)


class ActorRolloutRefConfig(StrictModel):
    """``actor_rollout_ref.*``: the policy, how it is trained and how it is sampled."""

    model: ModelConfig
    """The model."""
    actor: ActorConfig
    """How it is updated."""
    rollout: RolloutConfig = RolloutConfig()
    """How it is sampled."""
    ref: ReferenceConfig = ReferenceConfig()
    """The policy it is held close to."""
    hybrid_engine: bool = True
    """Engines share the trainer's devices; False: they have devices of their own."""


class RunConfig(StrictModel):
    """A whole run."""

    data: DataConfig
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """Values."""
    reward: RewardConfig = RewardConfig()
    """Scores."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective."""
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    """Rollouts beside updates."""
    trainer: TrainerConfig = TrainerConfig()
    """Length, place, output."""
    ray_kwargs: RayKwargsConfig = RayKwargsConfig()
    """Ray."""

    @model_validator(mode="before")
    @classmethod
    def _follow_fallbacks(cls, given: Any) -> Any:
        """Fill every value that follows another key; after this no reader needs to know the chains."""
        if not isinstance(given, Mapping):
            return given
        tree: dict[str, Any] = copy.deepcopy(dict(given))
        _size_of_a_step(tree)
        for key, source in FALLBACKS:
            if _value_at(tree, key) is None:
                _fill(tree, key, _value_at(tree, source))
        if _value_at(tree, "trainer.default_local_dir") is None:
            names = (_value_at(tree, "trainer.project_name"), _value_at(tree, "trainer.experiment_name"))
            _fill(tree, "trainer.default_local_dir", "checkpoints/{}/{}".format(*names))
        return tree

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained: as asked for, else because the estimator needs values."""
        return self.algorithm.estimator_reads("values") if self.critic.enable is None else self.critic.enable

    @property
    def needs_reference(self) -> bool:
        """Whether anything compares with the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference policy has a model of its own: with LoRA it is the actor without its adapters."""
        return self.needs_reference and self.actor_rollout_ref.model.lora_rank == 0

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def num_ranks(self) -> int:
        """Trainer ranks over all nodes."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def num_trainer_roles(self) -> int:
        """Groups of trainer ranks: the actor, the critic if there is one, the reference if it has a model of its own."""
        return 1 + int(self.needs_critic) + int(self.has_reference_model)

    @property
    def num_processes(self) -> int:
        """Processes of a run beside the driver."""
        return self.num_trainer_roles * self.num_ranks + self.num_engines

    @property
    def num_engine_devices(self) -> int:
        """Devices of all engines together."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        return (rollout.nnodes or trainer.nnodes) * (rollout.n_gpus_per_node or trainer.n_gpus_per_node)

    @property
    def num_devices(self) -> int:
        """Devices of all pools: engines that share the trainer's count once."""
        return self.num_ranks if self.actor_rollout_ref.hybrid_engine else self.num_ranks + self.num_engine_devices

    @property
    def num_engines(self) -> int:
        """Rollout engines over all nodes."""
        return self.num_engine_devices // self.actor_rollout_ref.rollout.tensor_model_parallel_size


def _size_of_a_step(tree: dict[str, Any]) -> None:
    """``data.train_batch_size`` as ``require_batches`` mini-batches, unless it is given; verl's recipes give it as 0."""
    count = _value_at(tree, "async_training.require_batches")
    mini = _value_at(tree, "actor_rollout_ref.actor.ppo_mini_batch_size")
    data = tree.get("data")
    given = data.get("train_batch_size") if isinstance(data, Mapping) else None
    if isinstance(count, int) and isinstance(mini, int) and given in (None, 0):
        _fill(tree, "data.train_batch_size", count * mini)


def _value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value given for ``key`` in a plain tree, or the schema's default."""
    section: type[BaseModel] = RunConfig
    value: Any = tree
    *path, leaf = key.split(".")
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
        section = cast(type[BaseModel], section.model_fields[part].annotation)
    if isinstance(value, Mapping) and value.get(leaf) is not None:
        return value[leaf]
    default = section.model_fields[leaf].default
    return None if default is PydanticUndefined else default


def _fill(tree: dict[str, Any], key: str, value: object) -> None:
    *path, leaf = key.split(".")
    section = tree
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):  # a wrong type, which validation will name
            return
    section[leaf] = value
