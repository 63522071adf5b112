"""WHAT a run is: the one tree, resolved and frozen."""

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, model_validator
from pydantic_core import PydanticUndefined

from verl_rc.config.actor import ActorConfig
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.base import StrictModel
from verl_rc.config.data import DataConfig
from verl_rc.config.model import ModelConfig
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
)


class ActorRolloutRefConfig(StrictModel):
    """``actor_rollout_ref.*``: the policy, how it is trained and how it is sampled."""

    model: ModelConfig
    """The model."""
    actor: ActorConfig
    """How it is updated."""
    rollout: RolloutConfig = RolloutConfig()
    """How it is sampled."""


class RunConfig(StrictModel):
    """A whole run."""

    data: DataConfig
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig
    """The policy."""
    reward: RewardConfig = RewardConfig()
    """Scores."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective."""
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
        for key, source in FALLBACKS:
            if _value_at(tree, key) is None:
                _fill(tree, key, _value_at(tree, source))
        if _value_at(tree, "trainer.default_local_dir") is None:
            names = (_value_at(tree, "trainer.project_name"), _value_at(tree, "trainer.experiment_name"))
            _fill(tree, "trainer.default_local_dir", "checkpoints/{}/{}".format(*names))
        return tree

    @property
    def num_ranks(self) -> int:
        """Trainer ranks over all nodes."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def num_engine_devices(self) -> int:
        """Devices of all engines together."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        return (rollout.nnodes or trainer.nnodes) * (rollout.n_gpus_per_node or trainer.n_gpus_per_node)

    @property
    def num_engines(self) -> int:
        """Rollout engines over all nodes."""
        return self.num_engine_devices // self.actor_rollout_ref.rollout.tensor_model_parallel_size

    def content_hash(self) -> str:
        """Hash of the resolved values: driver and workers compare it."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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
