"""What a run moves from step to step: the weight of the KL penalty and the rejection threshold."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from verl_rc.algorithm.ppo.control import Control, ControlState
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.config.algorithm import AlgorithmConfig, KlControlConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import measure


def of_penalty(**options: object) -> Control:
    return Control.from_config(AlgorithmConfig(kl_ctrl=KlControlConfig.model_validate(options)))


def test_a_fixed_weight_stays() -> None:
    control = of_penalty(kl_coef=0.3)
    assert control.after_penalty(99.0, 1024) is control


@pytest.mark.parametrize(
    ("observed", "factor"), [(0.11, 1 + 0.1 * 64 / 1000), (9.0, 1 + 0.2 * 0.064), (0.0, 1 - 0.2 * 0.064)]
)
def test_an_adaptive_weight_follows_the_clipped_relative_error(observed: float, factor: float) -> None:
    control = of_penalty(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=1000)
    assert control.after_penalty(observed, 64).kl_coef == pytest.approx(0.5 * factor)


FIELDS = {
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": 3.0,
    "rollout_rs_target_acceptance": 0.75,
    "diagnostics": "full",
}
CORRECTION = RolloutCorrectionConfig.model_validate(FIELDS)
OF_THRESHOLD = Control.from_config(AlgorithmConfig(rollout_correction=CORRECTION))


def measured_of(log_ratio: torch.Tensor) -> Measured:
    statistics = measure(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio), CORRECTION)
    return Measured(statistics, statistics)


def test_it_moves_a_tenth_of_the_way_in_logarithms_towards_what_the_batch_would_have_needed() -> None:
    ratios = torch.tensor([[1.01, 0.98, 1.25, 6.0]])
    measured = measured_of(ratios.log())
    assert OF_THRESHOLD.rejection_threshold == 3.0
    moved = OF_THRESHOLD.after_correction(measured)
    assert moved.rejection_threshold is not None
    assert math.log(moved.rejection_threshold) == pytest.approx(
        0.9 * math.log(3.0) + 0.1 * math.log(1.25), rel=0.005
    )
    assert moved.correction(CORRECTION).rejection_bounds()["token_k1"].upper == moved.rejection_threshold


def test_it_settles_where_the_wished_share_is_accepted() -> None:
    control, generator = OF_THRESHOLD, torch.Generator().manual_seed(0)
    for _ in range(60):
        log_ratio = 0.3 * torch.randn(64, 32, generator=generator)
        control = control.after_correction(measured_of(log_ratio))
    assert control.rejection_threshold is not None
    # three quarters of a normal distribution lie within 1.1503 standard deviations
    assert math.log(control.rejection_threshold) == pytest.approx(1.1503 * 0.3, rel=0.05)


def test_a_batch_without_tokens_moves_nothing() -> None:
    zeros = torch.zeros(1, 2)
    nothing = Measured(measure(zeros, zeros, zeros, CORRECTION), None)
    assert OF_THRESHOLD.after_correction(nothing) == OF_THRESHOLD


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
    control = replace(control, rejection_threshold=1.7)
    assert control.kl_coef == 0.2 * (1 + 0.2 * 1000 / 10_000)
    assert control.state == ControlState(control.kl_coef, 1.7)
    assert Control.from_config(configured, control.state) == control
    assert control.correction(ADAPTIVE).rollout_rs_threshold == 1.7


def test_what_is_fixed_now_stays_as_configured() -> None:
    fixed = algorithm("fixed", RolloutCorrectionConfig())
    control = Control.from_config(fixed, ControlState(kl_coef=0.9, rejection_threshold=1.7))
    assert control == Control.from_config(fixed)
    assert control.kl_coef == 0.2
    assert control.correction(ADAPTIVE) is ADAPTIVE
    assert control.after_penalty(9.0, 1000).state == ControlState()


def test_without_penalty_or_correction_nothing_moves() -> None:
    control = Control.from_config(algorithm("adaptive", ADAPTIVE))
    assert control.after_penalty(None, 1000).after_correction(None) == control


def of_entropy(**options: object) -> Control:
    return Control.from_config(AlgorithmConfig.model_validate({"adaptive_entropy": options}))


def test_the_weight_of_the_entropy_climbs_below_the_target_and_is_off_above_it() -> None:
    control = of_entropy(target_entropy=0.5, max_ent_coef=0.03, delta_ent_coef=0.01)
    weights, bonuses = [], []
    for entropy in (0.4, 0.4, 0.4, 0.4, 0.6, 0.3, 0.9, 0.9, 0.9, 0.9):
        bonuses.append(control.entropy_bonus(entropy))
        control = control.after_entropy(entropy)
        weights.append(control.entropy_coeff)
    assert weights == pytest.approx([0.01, 0.02, 0.03, 0.03, 0.02, 0.03, 0.02, 0.01, 0.0, 0.0])
    assert bonuses == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.0, 0.02, 0.0, 0.0, 0.0, 0.0])
    resumed = Control.from_config(control.algorithm, ControlState(entropy_coeff=0.02))
    assert resumed.entropy_coeff == 0.02
    assert resumed.state.entropy_coeff == 0.02


def test_without_a_target_the_configured_weight_holds() -> None:
    control = of_entropy()
    assert control.after_entropy(0.1) is control
    assert control.entropy_bonus(0.1) is None
    assert control.state.entropy_coeff is None
