"""The two numbers that a run may move from step to step: the weight of the KL penalty, and a rejection
threshold."""

import math
from dataclasses import dataclass, replace

from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, bound_for_acceptance


@dataclass(frozen=True)
class KLController:
    """The weight β of the divergence, and how it follows what was observed (arXiv:1909.08593, section 2.2).

    A value: ``updated`` returns the next one. All of it belongs in a checkpoint (``dataclasses.asdict``).
    """

    kl_coef: float
    """Β, in units of reward per nat, >= 0 (``algorithm.kl_ctrl.kl_coef``)."""
    target_kl: float | None = None
    """The divergence aimed at, nats per token, > 0; None keeps β fixed (``algorithm.kl_ctrl.type=fixed``)."""
    horizon: int = 10_000
    """Rows that a relative error of 1 would need to double β, > 0 (``algorithm.kl_ctrl.horizon``)."""

    def updated(self, observed_kl: float, num_rows: int) -> "KLController":
        """The controller after a batch: β ← β (1 + clip(KL / target − 1, ±0.2) · rows / horizon).

        Args:
            observed_kl: nats per token; the mean over the batch's rows of ``apply_kl_in_reward``'s
            divergence. num_rows: rows of the batch.
        """
        if self.target_kl is None:
            return self
        error = min(max(observed_kl / self.target_kl - 1, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1 + error * num_rows / self.horizon))


_MEMORY = 0.9
"""Share of the old threshold's logarithm that a batch leaves in place."""


@dataclass(frozen=True)
class AdaptiveThreshold:
    """``rollout_rs_target_acceptance``: u of the bounds 1/u to u, moved after every batch; belongs in a
    checkpoint.

    ``ln u <- 0.9 ln u + 0.1 ln u*`` with u* the smallest bound under which the batch just seen would have had
    the wished share accepted. A fixed threshold rejects more and more as the policies drift apart; this one
    holds what is kept.
    """

    threshold: float
    """Current u, >= 1."""
    rule: str
    target: float
    """Share of tokens or rows to accept, in (0, 1)."""

    @classmethod
    def from_config(cls, config: RolloutCorrectionConfig) -> "AdaptiveThreshold | None":
        """The configured threshold before the first batch; None when it is fixed."""
        if config.rollout_rs_target_acceptance is None:
            return None
        [(rule, bound)] = config.rejection_bounds().items()
        return cls(bound.upper, rule, config.rollout_rs_target_acceptance)

    def updated(self, statistics: CorrectionStatistics) -> "AdaptiveThreshold":
        """The threshold after a batch with these ``statistics``, which need the histograms of full
        diagnostics."""
        bound = bound_for_acceptance(statistics.numbers(), self.rule, self.target)
        if math.isnan(bound):
            return self
        return replace(
            self, threshold=math.exp(_MEMORY * math.log(self.threshold) + (1 - _MEMORY) * math.log(bound))
        )


@dataclass(frozen=True)
class ControlState:
    """The part of the control that a checkpoint keeps. None: the configured value applies."""

    kl_coef: float | None = None
    """Weight of the KL penalty in the reward."""
    rejection_threshold: float | None = None
    """Bound u of the rejection rule, >= 1."""


@dataclass(frozen=True)
class Control:
    """KL weight and rejection threshold of a step."""

    kl: KLController
    """Weight of the KL penalty in the reward."""
    threshold: AdaptiveThreshold | None
    """Threshold of the rejection rule; None: fixed by the configuration."""

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig, saved: ControlState | None = None) -> "Control":
        """The configured control with the numbers that a run ``saved``; fixed ones stay as configured."""
        options = algorithm.kl_ctrl
        saved = saved or ControlState()
        kl = KLController(
            options.kl_coef, options.target_kl if options.type == "adaptive" else None, options.horizon
        )
        if kl.target_kl is not None and saved.kl_coef is not None:
            kl = replace(kl, kl_coef=saved.kl_coef)
        threshold = AdaptiveThreshold.from_config(algorithm.rollout_correction)
        if threshold is not None and saved.rejection_threshold is not None:
            threshold = replace(threshold, threshold=saved.rejection_threshold)
        return cls(kl, threshold)

    def correction(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """``config`` with the current threshold."""
        if self.threshold is None:
            return config
        return config.model_copy(update={"rollout_rs_threshold": self.threshold.threshold})

    def after_penalty(self, reward_kl: float | None, num_rows: int) -> "Control":
        """The next step's, after ``num_rows`` rows whose reward was penalised for ``reward_kl`` nats per
        token (None: it was not)."""
        return self if reward_kl is None else replace(self, kl=self.kl.updated(reward_kl, num_rows))

    def after_correction(self, statistics: CorrectionStatistics | None) -> "Control":
        """The next step's, after a batch that was corrected (None: it was not)."""
        if statistics is None or self.threshold is None:
            return self
        return replace(self, threshold=self.threshold.updated(statistics))

    @property
    def state(self) -> ControlState:
        """The numbers that a checkpoint keeps."""
        kl_coef = None if self.kl.target_kl is None else self.kl.kl_coef
        return ControlState(kl_coef, None if self.threshold is None else self.threshold.threshold)
