"""The numbers that a run may adapt from step to step: the weights of the KL penalty and of the entropy bonus,
and a rejection threshold."""

import math
from dataclasses import dataclass, replace

from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import bound_for_acceptance

_MEMORY = 0.9
"""Share of the old threshold's logarithm that a batch leaves in place."""


@dataclass(frozen=True)
class ControlState:
    """The adaptive numbers of a checkpoint. None: the configured value applies."""

    kl_coef: float | None = None
    """Weight of the KL penalty in the reward."""
    rejection_threshold: float | None = None
    """Bound u of the rejection rule, >= 1."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus."""


@dataclass(frozen=True)
class Control:
    """KL weight, rejection threshold and entropy weight of a step. Immutable: methods return the next one."""

    algorithm: AlgorithmConfig
    """The configured values, and the rules by which they adapt."""
    kl_coef: float
    """The weight β of the KL penalty in the reward, in units of reward per nat, >= 0."""
    rejection_threshold: float | None
    """u of the bounds 1/u to u of the rejection rule, >= 1. None means the configuration's, which is fixed.
    """
    entropy_coeff: float | None = None
    """c, the weight of the entropy bonus where the entropy is below its target, >= 0. None without a
    target."""

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig, saved: ControlState | None = None) -> "Control":
        """The configured control with the numbers that a run ``saved``; fixed ones stay as configured."""
        saved = saved or ControlState()
        correction, kl_coef, threshold = algorithm.rollout_correction, algorithm.kl_ctrl.kl_coef, None
        if algorithm.kl_ctrl.type == "adaptive" and saved.kl_coef is not None:
            kl_coef = saved.kl_coef
        if correction.rollout_rs_target_acceptance is not None:
            [bound] = correction.rejection_bounds().values()
            threshold = bound.upper if saved.rejection_threshold is None else saved.rejection_threshold
        has_target = algorithm.adaptive_entropy.target_entropy is not None
        return cls(algorithm, kl_coef, threshold, (saved.entropy_coeff or 0.0) if has_target else None)

    def correction(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """``config`` with the current threshold."""
        if self.rejection_threshold is None:
            return config
        return config.model_copy(update={"rollout_rs_threshold": self.rejection_threshold})

    def after_penalty(self, reward_kl: float | None, num_rows: int) -> "Control":
        """The control of the next step, after a batch of ``num_rows`` rows with a penalised divergence of
        ``reward_kl`` (see ``StepInputs``).

        With ``algorithm.kl_ctrl.type=adaptive``: β ← β (1 + clip(KL / target − 1, ±0.2) · rows / horizon)
        (arXiv:1909.08593, section 2.2).
        """
        options = self.algorithm.kl_ctrl
        if reward_kl is None or options.type == "fixed":
            return self
        error = min(max(reward_kl / options.target_kl - 1, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1 + error * num_rows / options.horizon))

    def after_correction(self, measured: Measured | None) -> "Control":
        """The control of the next step, from what full diagnostics ``measured`` on this step's batch; None
        where it was not corrected.

        With ``rollout_rs_target_acceptance``: ``ln u <- 0.9 ln u + 0.1 ln u*``, where u* is the smallest
        bound under which the target share of the batch would have been accepted. A fixed threshold would
        reject more and more as the policies drift apart.
        """
        config = self.algorithm.rollout_correction
        target = config.rollout_rs_target_acceptance
        if measured is None or target is None:
            return self
        assert self.rejection_threshold is not None
        [rule] = config.rejection_bounds()
        bound = bound_for_acceptance(measured.statistics.numbers(), rule, target)
        if math.isnan(bound):
            return self
        moved = math.exp(_MEMORY * math.log(self.rejection_threshold) + (1 - _MEMORY) * math.log(bound))
        return replace(self, rejection_threshold=moved)

    def entropy_bonus(self, entropy: float) -> float | None:
        """The weight in the loss of a batch with this mean entropy, nats per token: c below the target, 0
        above it. None without a target."""
        target = self.algorithm.adaptive_entropy.target_entropy
        if target is None or self.entropy_coeff is None:
            return None
        return self.entropy_coeff if entropy <= target else 0.0

    def after_entropy(self, entropy: float) -> "Control":
        """The control of the next step, after a batch with this mean entropy: ``c ← clip(c ± delta, 0, max)``
        (arXiv:2505.22312), up below the target and down above it."""
        options = self.algorithm.adaptive_entropy
        if options.target_entropy is None or self.entropy_coeff is None:
            return self
        step = options.delta_ent_coef * (1 if entropy < options.target_entropy else -1)
        return replace(self, entropy_coeff=min(max(self.entropy_coeff + step, 0.0), options.max_ent_coef))

    @property
    def state(self) -> ControlState:
        """The numbers that a checkpoint keeps."""
        is_fixed = self.algorithm.kl_ctrl.type == "fixed"
        return ControlState(None if is_fixed else self.kl_coef, self.rejection_threshold, self.entropy_coeff)
