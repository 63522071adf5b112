"""The critic: which model estimates values, and how it is updated."""

from typing import Literal

from pydantic import Field

from verl_rc.config.actor import FsdpConfig, OptimConfig
from verl_rc.config.algorithms import LossAggregation
from verl_rc.config.schema import StrictModel, UserPath


class CriticModelConfig(StrictModel):
    """``critic.model.*``: the transformer below the value head."""

    path: UserPath | None = None
    """Hugging Face model folder or hub id; null: ``actor_rollout_ref.model.path``."""
    use_remove_padding: bool | None = None
    """Pack real tokens instead of padding rows; null: ``actor_rollout_ref.model.use_remove_padding``."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null: as the actor does."""
    trust_remote_code: bool | None = None
    """Run code that comes with the model; null: as for the actor's."""


class CriticOptimConfig(OptimConfig):
    """``critic.optim.*``."""

    lr: float = Field(1e-5, ge=0)
    """Peak learning rate."""


class CriticCheckpointConfig(StrictModel):
    """``critic.checkpoint.*``."""

    async_save: bool | None = None
    """Write beside the next step; null: as the actor does."""


class CriticConfig(StrictModel):
    """``critic.*``. A value left null follows the actor."""

    enable: bool | None = None
    """Train a critic; null: if the advantage estimator needs values (``gae``)."""
    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Sharding; both names mean FSDP2 here."""
    model: CriticModelConfig = CriticModelConfig()
    """The transformer below the value head."""
    optim: CriticOptimConfig = CriticOptimConfig()
    """Optimizer."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """Sharding and precision."""
    checkpoint: CriticCheckpointConfig = CriticCheckpointConfig()
    """How it is saved."""
    ppo_mini_batch_size: int | None = Field(None, ge=1)
    """Prompts per optimizer step, over all ranks; null: the actor's."""
    ppo_epochs: int | None = Field(None, ge=1)
    """Passes over the batch in each step; null: the actor's."""
    shuffle: bool | None = None
    """Draw a new order of rows in each pass; null: the actor's."""
    use_dynamic_bsz: bool | None = None
    """Fill micro-batches by tokens; null: the actor's."""
    ppo_max_token_len_per_gpu: int = Field(32768, ge=1)
    """Tokens of one micro-batch on one rank, in the update and when values are computed, with ``use_dynamic_bsz``."""
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Rows of one micro-batch on one rank without ``use_dynamic_bsz``; null: the actor's."""
    loss_agg_mode: LossAggregation | None = None
    """How token losses become one number; null: the actor's."""
    cliprange_value: float = Field(0.5, gt=0)
    """How far a value may move from its old one before its loss is clipped, in units of reward."""
