"""Decisions of an update that follow from the configuration: its loss, the evaluations before it, the limits
of micro-batches. Imports no torch."""

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.models import ActorConfig, CriticConfig, ReferenceConfig
from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.microbatch import MicroBatchLimit


def policy_loss_name(config: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    """The policy loss that runs."""
    return correction.named_loss or config.policy_loss.loss_mode


def mini_batch_loss_name(config: ActorConfig, correction: RolloutCorrectionConfig) -> str | None:
    """The policy loss that runs, if it reads the whole mini-batch first."""
    name = policy_loss_name(config, correction)
    spec = POLICY_LOSSES.get(name)
    return name if spec is not None and spec.reads_mini_batch else None


def distillation_loss_name(config: DistillationLossConfig, correction: RolloutCorrectionConfig) -> str | None:
    """The policy loss of the teacher's advantages. None if the loss differentiates the divergence from the
    teacher.
    """
    if not config.use_policy_gradient:
        return None
    return correction.named_loss or "vanilla"


def needs_statistics_first(config: RolloutCorrectionConfig) -> bool:
    """Whether the loss depends on the mean weight, or the number of kept tokens, of the whole mini-batch."""
    return config.rollout_is_batch_normalize or config.rejection_denominator == "kept"


def log_prob_limit(config: RolloutConfig | ReferenceConfig) -> MicroBatchLimit:
    """The limit of forward passes without gradient, of the actor or a frozen policy."""
    return _limit(
        config.log_prob_use_dynamic_bsz,
        config.log_prob_max_token_len_per_gpu,
        config.log_prob_micro_batch_size_per_gpu,
    )


def update_limit(config: ActorConfig | CriticConfig) -> MicroBatchLimit:
    """The limit of passes with gradient; for the critic, of those without too."""
    return _limit(
        config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size_per_gpu
    )


def _limit(by_tokens: bool, max_tokens: int, max_rows: int | None) -> MicroBatchLimit:
    return MicroBatchLimit(max_tokens=max_tokens) if by_tokens else MicroBatchLimit(max_rows=max_rows)
