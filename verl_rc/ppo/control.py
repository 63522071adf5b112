"""The two numbers that a run may move from step to step: the weight of the KL penalty, and a rejection threshold."""

from dataclasses import dataclass, replace

from verl_rc.advantage import KLController
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics
from verl_rc.ppo.adaptive_threshold import AdaptiveThreshold


@dataclass(frozen=True)
class MovedControl:
    """What a run has moved so far; belongs in a checkpoint. None: the configuration's own value is in force."""

    kl_coef: float | None = None
    """Weight of the KL penalty in the reward."""
    rejection_threshold: float | None = None
    """Bound u of the rejection rule, >= 1."""


@dataclass(frozen=True)
class Control:
    """What is in force in a step."""

    kl: KLController
    """Weight of the KL penalty in the reward."""
    threshold: AdaptiveThreshold | None
    """Of the rejection rule; None: fixed by the configuration."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, moved: MovedControl | None = None) -> "Control":
        """What a configuration asks for, with the numbers that the run has ``moved``; what is fixed now stays as configured."""
        given, moved = algorithm.kl_ctrl, moved or MovedControl()
        kl = KLController(given.kl_coef, given.target_kl if given.type == "adaptive" else None, given.horizon)
        if kl.target_kl is not None and moved.kl_coef is not None:
            kl = replace(kl, kl_coef=moved.kl_coef)
        threshold = AdaptiveThreshold.of(algorithm.rollout_correction)
        if threshold is not None and moved.rejection_threshold is not None:
            threshold = replace(threshold, threshold=moved.rejection_threshold)
        return cls(kl, threshold)

    def correction(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """``config`` with the threshold in force."""
        return config if self.threshold is None else self.threshold.config(config)

    def after_penalty(self, reward_kl: float | None, num_rows: int) -> "Control":
        """The next step's, after ``num_rows`` rows whose reward was penalised for ``reward_kl`` nats per token (None: it was
        not)."""
        return self if reward_kl is None else replace(self, kl=self.kl.updated(reward_kl, num_rows))

    def after_correction(self, statistics: CorrectionStatistics | None) -> "Control":
        """The next step's, after a batch that was corrected (None: it was not)."""
        if statistics is None or self.threshold is None:
            return self
        return replace(self, threshold=self.threshold.updated(statistics))

    @property
    def moved(self) -> MovedControl:
        """The numbers that a checkpoint keeps."""
        kl_coef = None if self.kl.target_kl is None else self.kl.kl_coef
        return MovedControl(kl_coef, None if self.threshold is None else self.threshold.threshold)
