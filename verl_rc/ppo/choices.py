"""What a configuration chooses of an update. Loads without torch, so that a plan does too."""

from verl_rc.config.actor import ActorConfig, CovarianceLoss
from verl_rc.config.rollout_correction import RolloutCorrectionConfig


def policy_loss_name(config: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    """The policy loss that runs: ``reinforce`` when bypass mode asks for it, else ``policy_loss.loss_mode``."""
    return "reinforce" if correction.loss_type == "reinforce" else config.policy_loss.loss_mode


def covariance_loss_name(config: ActorConfig, correction: RolloutCorrectionConfig) -> CovarianceLoss | None:
    """The policy loss that runs, if it is one of the two that look at the covariances of a whole mini-batch."""
    name = policy_loss_name(config, correction)
    return "clip_cov" if name == "clip_cov" else "kl_cov" if name == "kl_cov" else None


def needs_statistics_first(config: RolloutCorrectionConfig) -> bool:
    """Whether a loss depends on the whole mini-batch: on its mean weight, or on how many tokens are kept of it."""
    return config.rollout_is_batch_normalize or config.rejection_denominator == "kept"
