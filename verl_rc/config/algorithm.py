"""What is optimised: advantages and rollout correction."""

from pydantic import Field

from verl_rc.config.base import StrictModel
from verl_rc.config.rollout_correction import RolloutCorrectionConfig


class AlgorithmConfig(StrictModel):
    """``algorithm.*``."""

    adv_estimator: str = "gae"
    """Advantage estimator."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; False is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights and rejection between rollout and trainer; ``preset`` names a whole choice."""
