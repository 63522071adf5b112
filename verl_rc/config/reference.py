"""The reference policy, which the actor is held close to."""

from typing import Literal

from pydantic import Field

from verl_rc.config.actor import FsdpConfig
from verl_rc.config.schema import StrictModel, UserPath


class ReferenceConfig(StrictModel):
    """``actor_rollout_ref.ref.*``. With LoRA the reference is the actor without its adapters, and needs no model of its own."""

    model_path: UserPath | None = None
    """Hugging Face model folder or hub id; null: ``actor_rollout_ref.model.path``."""
    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Sharding; both names mean FSDP2 here."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """Sharding and precision; there is no optimizer to offload."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Fill log-prob micro-batches by tokens; null: ``actor.use_dynamic_bsz``."""
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """Tokens of a log-prob micro-batch; null: ``actor.ppo_max_token_len_per_gpu``."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Rows of a log-prob micro-batch; null: ``actor.ppo_micro_batch_size_per_gpu``."""
