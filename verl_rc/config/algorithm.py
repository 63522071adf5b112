"""What is optimised: advantages and rollout correction."""

from typing import Literal

from pydantic import Field

from verl_rc.config.actor import KlKind
from verl_rc.config.base import StrictModel
from verl_rc.config.rollout_correction import RolloutCorrectionConfig

GROUP_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
"""Estimators that compare the samples of one prompt."""
ADVANTAGE_ESTIMATORS = (*GROUP_ESTIMATORS, "gae", "reinforce_plus_plus", "grpo_vectorized", "rloo_vectorized")
"""Names for ``algorithm.adv_estimator``; the ``_vectorized`` ones are verl's, and the same thing."""


class KlControlConfig(StrictModel):
    """``algorithm.kl_ctrl.*``: the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: the weight follows the divergence that is observed."""
    kl_coef: float = Field(0.001, ge=0)
    """The weight, reward per nat; where an adaptive one starts."""
    target_kl: float = Field(0.1, gt=0)
    """Divergence that an adaptive weight aims at, nats per token."""
    horizon: int = Field(10_000, ge=1)
    """Rows after which a relative error of 1 would have doubled an adaptive weight."""


class AlgorithmConfig(StrictModel):
    """``algorithm.*``."""

    adv_estimator: str = "gae"
    """Advantage estimator: a name, or ``module:function`` for one of your own; formulas in ``verl_rc.advantage``."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; False is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    kl_penalty: KlKind = "kl"
    """Estimator of that penalty."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    """Weight of that penalty."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights and rejection between rollout and trainer; ``preset`` names a whole choice."""
