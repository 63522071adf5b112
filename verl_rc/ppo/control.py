"""The two numbers that a run may move from step to step: the weight of the KL penalty, and a rejection threshold."""

from dataclasses import dataclass, replace

from verl_rc.advantage import KLController
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.ppo.adaptive_threshold import AdaptiveThreshold


@dataclass(frozen=True)
class Control:
    """What is in force in a step. Values: a step makes the next one's; all of it belongs in a checkpoint."""

    kl: KLController
    """Weight of the KL penalty in the reward."""
    threshold: AdaptiveThreshold | None
    """Of the rejection rule; None: fixed by the configuration."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> "Control":
        """What a configuration asks for, before the first step."""
        control = algorithm.kl_ctrl
        target = control.target_kl if control.type == "adaptive" else None
        return cls(KLController(control.kl_coef, target, control.horizon), AdaptiveThreshold.of(algorithm.rollout_correction))

    def correction(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """``config`` with the threshold in force."""
        return config if self.threshold is None else self.threshold.config(config)

    def state(self) -> dict[str, float | None]:
        """The numbers, as JSON data."""
        return {"kl_coef": self.kl.kl_coef, "threshold": None if self.threshold is None else self.threshold.threshold}

    def resumed(self, state: dict[str, float | None]) -> "Control":
        """With the numbers of ``state`` where both know them; everything else as configured now."""
        kl, threshold = self.kl, self.threshold
        if kl.target_kl is not None and state["kl_coef"] is not None:
            kl = replace(kl, kl_coef=state["kl_coef"])
        if threshold is not None and state["threshold"] is not None:
            threshold = replace(threshold, threshold=state["threshold"])
        return Control(kl, threshold)
