"""What a run moves from step to step survives a checkpoint."""

import json
from dataclasses import replace

from verl_rc.config.algorithm import AlgorithmConfig, KlControlConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.ppo.control import Control

ADAPTIVE = RolloutCorrectionConfig(
    rollout_rs="seq_mean_k1", rollout_rs_threshold=1.2, rollout_rs_target_acceptance=0.9, diagnostics="full"
)


def algorithm(kind: str, correction: RolloutCorrectionConfig) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"kl_ctrl": KlControlConfig.model_validate({"type": kind, "kl_coef": 0.2}), "rollout_correction": correction}
    )


def test_moved_numbers_come_back() -> None:
    control = Control.of(algorithm("adaptive", ADAPTIVE))
    assert control.threshold is not None
    moved = Control(control.kl.updated(1.0, 1000), replace(control.threshold, threshold=1.7))
    assert moved.kl.kl_coef == 0.2 * (1 + 0.2 * 1000 / 10_000)
    assert control.resumed(json.loads(json.dumps(moved.state()))) == moved
    assert moved.correction(ADAPTIVE).rollout_rs_threshold == 1.7


def test_what_is_fixed_now_stays_as_configured() -> None:
    moved = Control.of(algorithm("adaptive", ADAPTIVE))
    fixed = Control.of(algorithm("fixed", RolloutCorrectionConfig()))
    assert fixed.resumed({**moved.state(), "kl_coef": 0.9}) == fixed
    assert fixed.correction(ADAPTIVE) is ADAPTIVE
