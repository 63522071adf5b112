"""Configuration of advantages, KL penalty, dynamic sampling and rollout correction."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, EstimatorInput, EstimatorSpec
from verl_rc.config.models import KlKind
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.schema import StrictModel

REWARD_METRICS = ("reward", "seq_reward", "seq_final_reward")
"""Values of ``filter_groups.metric`` that mean the reward before a KL penalty, in any of verl's releases."""


class KlControlConfig(StrictModel):
    """``algorithm.kl_ctrl.*``: the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: the weight follows the observed divergence."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight in reward per nat; the initial value of an adaptive weight."""
    target_kl: float = Field(0.1, gt=0)
    """Target divergence of an adaptive weight, nats per token."""
    horizon: int = Field(10_000, ge=1)
    """Rows in which an adaptive weight would double at a relative error of 1."""


class AdaptiveEntropyConfig(StrictModel):
    """``algorithm.adaptive_entropy.*``: an entropy bonus whose weight holds the policy's entropy up
    (Skywork-OR1, arXiv:2505.22312); it needs the decoupled mode."""

    target_entropy: float | None = Field(None, gt=0)
    """Entropy that the policy should keep, nats per token; null: ``actor.entropy_coeff`` is the weight."""
    max_ent_coef: float = Field(0.005, gt=0)
    """Largest weight of the bonus."""
    delta_ent_coef: float = Field(0.0001, gt=0)
    """Step of the weight, which begins at 0: up after a batch below the target, down after one above."""


class FilterGroupsConfig(StrictModel):
    """``algorithm.filter_groups.*``: dynamic sampling (DAPO, arXiv:2503.14476): train only on prompts whose
    samples differ."""

    enable: bool = False
    """Drop prompts whose samples all have the same ``metric`` and draw others until ``data.train_batch_size``
    remain; surplus prompts are dropped, in an asynchronous run kept for the next step."""
    metric: str = "reward"
    """Quantity by which samples are compared: ``reward`` (synonyms ``seq_reward``, ``seq_final_reward``),
    ``score`` (before the overlong penalty), or a numeric column of the reward function, e.g. ``acc``."""
    max_num_gen_batches: int = Field(0, ge=0)
    """Maximum batches of ``data.gen_batch_size`` prompts per step; the next one ends the run. 0: no limit."""


class AlgorithmConfig(StrictModel):
    """``algorithm.*``."""

    adv_estimator: str = "gae"
    """Advantage estimator: a name of the table of advantage estimators, or ``module:function`` for one of
    your own."""
    adv_estimator_inputs: list[EstimatorInput] = []
    """Inputs of a ``module:function`` estimator beside rewards, mask and groups."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; False is Dr. GRPO."""
    turn_credit: Literal["episode", "turn"] = "episode"
    """``turn``: a turn's tokens are credited with the rewards from that turn on, compared with the same turn
    of the group's other samples (arXiv:2511.14846). ``episode``: with all rewards."""
    gdpo_reward_keys: list[str] | None = None
    """``gdpo``: columns of the reward function that are normalised one by one; ``score`` is the score itself.
    """
    gdpo_reward_weights: list[float] | None = None
    """``gdpo``: weights of these columns; null: 1 each."""
    mask_truncated_responses: bool = False
    """Leave responses that no stop token ended out of the actor's loss and its denominators (DAPO's overlong
    filtering). They count in group baselines and for the critic."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    kl_penalty: KlKind = "kl"
    """Estimator of the KL penalty."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    """Weight of the KL penalty."""
    adaptive_entropy: AdaptiveEntropyConfig = AdaptiveEntropyConfig()
    """An entropy bonus towards a target."""
    max_refills: int = Field(0, ge=0)
    """Times that a step replaces groups of which rejection in the driver keeps no token by newly sampled
    ones; their log-probs are computed twice. 0: never, and the batch shrinks."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights and rejection between rollout and trainer; ``preset`` sets several keys at once."""

    @model_validator(mode="after")
    def _check_refills(self) -> Self:
        correction, settings = self.rollout_correction, self.rollout_correction.settings()
        if not self.max_refills:
            return self
        if correction.mode != "decoupled" or not (settings.rules or settings.log_veto is not None):
            raise ValueError(
                f"algorithm.max_refills={self.max_refills} replaces groups of which rollout_rs in the driver "
                f"keeps no token, got rollout_rs={correction.rollout_rs} in {correction.mode} mode; pass a "
                "rule and algorithm.rollout_correction.bypass_mode=False, or drop it"
            )
        most_batches = self.filter_groups.max_num_gen_batches
        if self.filter_groups.enable and most_batches > 0:
            raise ValueError(
                f"algorithm.max_refills={self.max_refills} draws further prompts, which algorithm."
                f"filter_groups.max_num_gen_batches={most_batches} limits for one batch; pass 0, or drop "
                "one of them"
            )
        if correction.rollout_rs_target_acceptance is not None:
            raise ValueError(
                f"algorithm.max_refills={self.max_refills} hides rejected groups from "
                "algorithm.rollout_correction.rollout_rs_target_acceptance="
                f"{correction.rollout_rs_target_acceptance}, whose threshold would fall in every step; drop "
                "one of them"
            )
        return self

    @property
    def estimator(self) -> EstimatorSpec | None:
        """The advantage estimator. None for a function of the user's own."""
        return ADVANTAGE_ESTIMATORS.get(self.adv_estimator)

    def estimator_reads(self, name: EstimatorInput) -> bool:
        """Whether the advantage estimator reads this input; a function of the user's own declares its
        inputs."""
        inputs = self.adv_estimator_inputs if self.estimator is None else self.estimator.inputs
        return name in inputs
