"""What is optimised: advantages and rollout correction."""

from typing import Literal

from pydantic import Field

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, EstimatorInput, EstimatorSpec
from verl_rc.config.models import KlKind
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.schema import StrictModel

REWARD_METRICS = ("reward", "seq_reward", "seq_final_reward")
"""Values of ``filter_groups.metric`` that mean what is trained on, before a KL penalty; verl's names of all releases."""


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


class FilterGroupsConfig(StrictModel):
    """``algorithm.filter_groups.*``: dynamic sampling (DAPO, arXiv:2503.14476), which trains on prompts that tell something."""

    enable: bool = False
    """Drop prompts whose samples all have the same ``metric`` and draw further ones until ``data.train_batch_size`` are left.
    What is left beyond that is dropped too. A prompt that was dropped comes again in the next epoch; epochs beyond
    ``trainer.total_epochs`` are begun where that is needed for the number of steps."""
    metric: str = "reward"
    """What samples of a prompt are compared by: ``reward`` (or ``seq_reward``, ``seq_final_reward``: the same thing here),
    ``score``, which is what the reward function gave before the overlong penalty, or a column of numbers that the function
    returns beside it, e.g. ``acc``."""
    max_num_gen_batches: int = Field(0, ge=0)
    """Batches of ``data.gen_batch_size`` prompts that one step may sample; a step that needs more ends the run. 0: no limit."""


class AlgorithmConfig(StrictModel):
    """``algorithm.*``."""

    adv_estimator: str = "gae"
    """Advantage estimator: a name, or ``module:function`` for one of your own; the table of advantage estimators
    below says what each computes."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; False is Dr.GRPO."""
    gdpo_reward_keys: list[str] | None = None
    """``gdpo``: columns returned by the reward function that are normalised one by one; ``score`` is the score itself."""
    gdpo_reward_weights: list[float] | None = None
    """``gdpo``: their weights; null: 1 each."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    kl_penalty: KlKind = "kl"
    """Estimator of that penalty."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    """Weight of that penalty."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights and rejection between rollout and trainer; ``preset`` names a whole choice."""

    @property
    def estimator(self) -> EstimatorSpec | None:
        """The advantage estimator; None: a function of the user's own."""
        return ADVANTAGE_ESTIMATORS.get(self.adv_estimator)

    def estimator_reads(self, name: EstimatorInput) -> bool:
        """Whether the advantage estimator is known to read an input."""
        return self.estimator is not None and name in self.estimator.inputs
