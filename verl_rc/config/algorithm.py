"""Configuration of advantages, KL penalty, dynamic sampling and rollout correction."""

from typing import Literal

from pydantic import Field

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, EstimatorInput, EstimatorSpec
from verl_rc.config.models import KlKind
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.schema import StrictModel

REWARD_METRICS = ("reward", "seq_reward", "seq_final_reward")
"""Values of ``filter_groups.metric`` that mean what is trained on, before a KL penalty; verl's names of all
releases."""


class KlControlConfig(StrictModel):
    """``algorithm.kl_ctrl.*``: the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: the weight follows the divergence that is observed."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight in reward per nat; the initial value of an adaptive weight."""
    target_kl: float = Field(0.1, gt=0)
    """Target divergence of an adaptive weight, nats per token."""
    horizon: int = Field(10_000, ge=1)
    """Time constant of an adaptive weight, in rows: at a relative error of 1 the weight would double in this
    many rows."""


class FilterGroupsConfig(StrictModel):
    """``algorithm.filter_groups.*``: dynamic sampling (DAPO, arXiv:2503.14476): train only on prompts whose
    samples differ."""

    enable: bool = False
    """Drop prompts whose samples all have the same ``metric`` and draw further prompts until
    ``data.train_batch_size`` remain; surplus prompts are dropped too. A dropped prompt is used again in the
    next epoch. Epochs beyond ``trainer.total_epochs`` start where the number of steps needs them. In an
    asynchronous run a prompt is replaced as soon as its samples are scored, and surplus prompts stay for the
    next step."""
    metric: str = "reward"
    """The quantity by which samples of a prompt are compared: ``reward`` (or ``seq_reward``,
    ``seq_final_reward``, its synonyms), ``score`` (the reward before the overlong penalty), or a numeric
    column that the reward function returns, e.g. ``acc``."""
    max_num_gen_batches: int = Field(0, ge=0)
    """Maximum batches of ``data.gen_batch_size`` prompts per step; a step that needs more ends the run. 0: no
    limit."""


class AlgorithmConfig(StrictModel):
    """``algorithm.*``."""

    adv_estimator: str = "gae"
    """Advantage estimator: a name, or ``module:function`` for one of your own; the table of advantage
    estimators below says what each computes."""
    adv_estimator_inputs: list[EstimatorInput] = []
    """What a ``module:function`` estimator reads beside rewards, mask and groups; the run computes these for
    it. For a name of the table it is known."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; False is Dr.GRPO."""
    turn_credit: Literal["episode", "turn"] = "episode"
    """``turn``: the tokens of a turn are credited with the rewards from that turn on (arXiv:2511.14846,
    undiscounted), compared with those of the group's samples from their turn of the same number; 0 where no
    other sample has one. ``episode``: all turns are credited with the sum."""
    gdpo_reward_keys: list[str] | None = None
    """``gdpo``: columns returned by the reward function that are normalised one by one; ``score`` is the
    score itself."""
    gdpo_reward_weights: list[float] | None = None
    """``gdpo``: their weights; null: 1 each."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    kl_penalty: KlKind = "kl"
    """Estimator of the KL penalty."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    """Weight of that penalty."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights and rejection between rollout and trainer; ``preset`` sets several keys at once."""

    @property
    def estimator(self) -> EstimatorSpec | None:
        """The advantage estimator; None: a function of the user's own."""
        return ADVANTAGE_ESTIMATORS.get(self.adv_estimator)

    def estimator_reads(self, name: EstimatorInput) -> bool:
        """Whether the advantage estimator reads this input; one of the user's own declares it."""
        inputs = self.adv_estimator_inputs if self.estimator is None else self.estimator.inputs
        return name in inputs
