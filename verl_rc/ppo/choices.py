"""What a configuration chooses of an update. Loads without torch, so that a plan does too."""

from verl_rc.config.actor import ActorConfig
from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.rollout_correction import RolloutCorrectionConfig


def policy_loss_name(config: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    """The policy loss that runs: ``reinforce`` when bypass mode asks for it, else ``policy_loss.loss_mode``."""
    return "reinforce" if correction.loss_type == "reinforce" else config.policy_loss.loss_mode


def covariance_loss_name(config: ActorConfig, correction: RolloutCorrectionConfig) -> str | None:
    """The policy loss that runs, if it selects tokens by their covariance over the mini-batch."""
    name = policy_loss_name(config, correction)
    spec = POLICY_LOSSES.get(name)
    return name if spec is not None and spec.selects_by_covariance else None


def needs_statistics_first(config: RolloutCorrectionConfig) -> bool:
    """Whether a loss depends on the whole mini-batch: on its mean weight, or on how many tokens are kept of it."""
    return config.rollout_is_batch_normalize or config.rejection_denominator == "kept"
