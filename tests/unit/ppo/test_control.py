"""What a run moves from step to step: the weight of the KL penalty and the rejection threshold."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from pydantic import ValidationError

from verl_rc.config.algorithm import AlgorithmConfig, KlControlConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import measure
from verl_rc.ppo.control import AdaptiveThreshold, Control, ControlState, KLController


def test_a_fixed_controller_stays() -> None:
    controller = KLController(0.3)
    assert controller.updated(99.0, 1024) is controller


@pytest.mark.parametrize(
    ("observed", "factor"), [(0.11, 1 + 0.1 * 64 / 1000), (9.0, 1 + 0.2 * 0.064), (0.0, 1 - 0.2 * 0.064)]
)
def test_an_adaptive_controller_follows_the_clipped_relative_error(observed: float, factor: float) -> None:
    controller = KLController(0.5, target_kl=0.1, horizon=1000)
    assert controller.updated(observed, 64).kl_coef == pytest.approx(0.5 * factor)


def test_a_saved_controller_continues_where_it_was() -> None:
    controller = KLController(0.5, target_kl=0.1, horizon=1000).updated(0.3, 64)
    assert KLController(**asdict(controller)) == controller


FIELDS = {
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": 3.0,
    "rollout_rs_target_acceptance": 0.75,
    "diagnostics": "full",
}


def test_it_moves_a_tenth_of_the_way_in_logarithms_towards_what_the_batch_would_have_needed() -> None:
    config = RolloutCorrectionConfig.model_validate(FIELDS)
    ratios = torch.tensor([[1.01, 0.98, 1.25, 6.0]])
    statistics = measure(ratios.log(), torch.zeros(1, 4), torch.ones(1, 4), config)
    adaptive = AdaptiveThreshold.from_config(config)
    assert adaptive is not None
    assert adaptive.threshold == 3.0
    moved = adaptive.updated(statistics)
    assert math.log(moved.threshold) == pytest.approx(0.9 * math.log(3.0) + 0.1 * math.log(1.25), rel=0.005)
    in_force = Control(KLController(0.0), moved).correction(config)
    assert in_force.rejection_bounds()["token_k1"].upper == moved.threshold


def test_it_settles_where_the_wished_share_is_accepted() -> None:
    config = RolloutCorrectionConfig.model_validate(FIELDS)
    adaptive, generator = AdaptiveThreshold.from_config(config), torch.Generator().manual_seed(0)
    assert adaptive is not None
    for _ in range(60):
        log_ratio = 0.3 * torch.randn(64, 32, generator=generator)
        adaptive = adaptive.updated(measure(log_ratio, torch.zeros(64, 32), torch.ones(64, 32), config))
    # three quarters of a normal distribution lie within 1.1503 standard deviations
    assert math.log(adaptive.threshold) == pytest.approx(1.1503 * 0.3, rel=0.05)


def test_a_batch_without_tokens_moves_nothing() -> None:
    config = RolloutCorrectionConfig.model_validate(FIELDS)
    adaptive = AdaptiveThreshold.from_config(config)
    assert adaptive is not None
    assert (
        adaptive.updated(measure(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), config)) == adaptive
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diagnostics": "core"}, "histograms of"),
        ({"rollout_rs": "token_k3"}, "one rule out of"),
        ({"rollout_rs_threshold": "0.5_2.0"}, "one number"),
        ({"rollout_rs": "token_k1,seq_mean_k1"}, "one rule out of"),
        ({"rollout_rs_target_acceptance": 1.0}, "less than 1"),
    ],
)
def test_what_it_cannot_follow_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutCorrectionConfig.model_validate({**FIELDS, **change})


ADAPTIVE = RolloutCorrectionConfig(
    rollout_rs="seq_mean_k1", rollout_rs_threshold=1.2, rollout_rs_target_acceptance=0.9, diagnostics="full"
)


def algorithm(kind: str, correction: RolloutCorrectionConfig) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {
            "kl_ctrl": KlControlConfig.model_validate({"type": kind, "kl_coef": 0.2}),
            "rollout_correction": correction,
        }
    )


def test_moved_numbers_come_back() -> None:
    configured = algorithm("adaptive", ADAPTIVE)
    control = Control.from_config(configured).after_penalty(1.0, 1000)
    assert control.threshold is not None
    control = replace(control, threshold=replace(control.threshold, threshold=1.7))
    assert control.kl.kl_coef == 0.2 * (1 + 0.2 * 1000 / 10_000)
    assert control.state == ControlState(control.kl.kl_coef, 1.7)
    assert Control.from_config(configured, control.state) == control
    assert control.correction(ADAPTIVE).rollout_rs_threshold == 1.7


def test_what_is_fixed_now_stays_as_configured() -> None:
    fixed = algorithm("fixed", RolloutCorrectionConfig())
    control = Control.from_config(fixed, ControlState(kl_coef=0.9, rejection_threshold=1.7))
    assert control == Control.from_config(fixed)
    assert control.kl.kl_coef == 0.2
    assert control.correction(ADAPTIVE) is ADAPTIVE
    assert control.after_penalty(9.0, 1000).state == ControlState()


def test_without_penalty_or_correction_nothing_moves() -> None:
    control = Control.from_config(algorithm("adaptive", ADAPTIVE))
    assert control.after_penalty(None, 1000).after_correction(None) == control
