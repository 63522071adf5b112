"""What a run moves from step to step survives a checkpoint."""

from dataclasses import replace

from verl_rc.config.algorithm import AlgorithmConfig, KlControlConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.ppo.control import Control, MovedControl

ADAPTIVE = RolloutCorrectionConfig(
    rollout_rs="seq_mean_k1", rollout_rs_threshold=1.2, rollout_rs_target_acceptance=0.9, diagnostics="full"
)


def algorithm(kind: str, correction: RolloutCorrectionConfig) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"kl_ctrl": KlControlConfig.model_validate({"type": kind, "kl_coef": 0.2}), "rollout_correction": correction}
    )


def test_moved_numbers_come_back() -> None:
    configured = algorithm("adaptive", ADAPTIVE)
    control = Control.of(configured).after_penalty(1.0, 1000)
    assert control.threshold is not None
    control = replace(control, threshold=replace(control.threshold, threshold=1.7))
    assert control.kl.kl_coef == 0.2 * (1 + 0.2 * 1000 / 10_000)
    assert control.moved == MovedControl(control.kl.kl_coef, 1.7)
    assert Control.of(configured, control.moved) == control
    assert control.correction(ADAPTIVE).rollout_rs_threshold == 1.7


def test_what_is_fixed_now_stays_as_configured() -> None:
    fixed = algorithm("fixed", RolloutCorrectionConfig())
    control = Control.of(fixed, MovedControl(kl_coef=0.9, rejection_threshold=1.7))
    assert control == Control.of(fixed)
    assert control.kl.kl_coef == 0.2
    assert control.correction(ADAPTIVE) is ADAPTIVE
    assert control.after_penalty(9.0, 1000).moved == MovedControl()


def test_without_penalty_or_correction_nothing_moves() -> None:
    control = Control.of(algorithm("adaptive", ADAPTIVE))
    assert control.after_penalty(None, 1000).after_correction(None) == control
