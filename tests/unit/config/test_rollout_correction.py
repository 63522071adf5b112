"""The correction section: contradictions are refused when it is built."""

import math

import pytest
from pydantic import ValidationError

from verl_rc.config.rejection_rules import Threshold
from verl_rc.config.rollout_correction import WEIGHT_LEVELS, RolloutCorrectionConfig, WeightSettings


def test_the_default_measures_and_corrects_nothing() -> None:
    config = RolloutCorrectionConfig()
    assert (config.rollout_is, config.rollout_rs, config.bypass_mode) == (None, None, False)
    assert config.rejection_bounds() == {}
    assert not config.rejects


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_is": "tokens"}, "did you mean token"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "needs .*rollout_is_threshold, got null"),
        ({"rollout_is": "token", "rollout_is_threshold": float("nan")}, "finite and > 0"),
        ({"rollout_is_batch_normalize": True}, "needs weights to normalise"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold, got null"),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 2}, "use seq_sum_k1"),
        ({"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "2,0.1,3"}, "one for each of the 2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "must be one upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "must be >= 1"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs is null"),
        ({"rollout_token_veto_threshold": 2.0}, "less than or equal to 1"),
        ({"loss_type": "reinforce"}, "loss of bypass mode"),
        ({"loss_type": "topr"}, "loss_type=topr is a loss of bypass mode"),
        (
            {
                "loss_type": "topr",
                "bypass_mode": True,
                "rollout_is": "token",
                "rollout_is_batch_normalize": True,
            },
            "scales nothing with loss_type=topr",
        ),
        ({"scale_lr_by_ess": "sqrt"}, "weights that are known before the update, got rollout_is=None"),
        (
            {"scale_lr_by_ess": "sqrt", "rollout_is": "token", "proximal": "interpolate"},
            "got rollout_is=token in interpolated mode",
        ),
        ({"rejection_denominator": "kept"}, "needs a rejection rule"),
        ({"rejected_in_group_baseline": "exclude"}, "needs decoupled mode and a rejection rule"),
        ({"proximal": "interpolate", "bypass_mode": True}, "has no proximal one; drop one of them"),
        (
            {
                "proximal": "interpolate",
                "rejected_in_group_baseline": "exclude",
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 2.0,
            },
            "what is rejected before the update",
        ),
        ({"nonfinite_stop_fraction": 2}, "less than or equal to 1"),
        ({"surplus": 1}, "Extra inputs"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutCorrectionConfig.model_validate(fields)


def test_one_threshold_serves_all_rules_or_each_has_its_own() -> None:
    shared = RolloutCorrectionConfig(rollout_rs="token_k2,seq_max_k2", rollout_rs_threshold=0.5)
    assert [bound.upper for bound in shared.rejection_bounds().values()] == [0.5, 0.5]
    own = RolloutCorrectionConfig(
        rollout_rs=["token_k1", "seq_mean_k3"], rollout_rs_threshold=["0.5_2.0", 0.01]
    )
    assert [(bound.lower, bound.upper) for bound in own.rejection_bounds().values()] == [
        (0.5, 2.0),
        (None, 0.01),
    ]


@pytest.mark.parametrize("level", [None, *WEIGHT_LEVELS])
def test_settings_are_the_options_as_typed_values(level: str | None) -> None:
    config = RolloutCorrectionConfig.model_validate(
        {
            "rollout_is": level,
            "rollout_is_threshold": 2.0 if level is None else "0.5_5.0",
            "rollout_rs": "token_k1,seq_mean_k3,seq_sum_k1",
            "rollout_rs_threshold": "0.5_4.0,0.01,2.0",
            "rollout_token_veto_threshold": 0.25,
            "nonfinite_logprob": "raise",
            "diagnostics": "core",
        }
    )
    settings = config.settings()
    if level is None:
        assert settings.weights is None
    else:
        assert settings.weights == WeightSettings(level, Threshold(5.0, 0.5), batch_normalize=False)
        assert settings.weights.is_per_row == (level in ("sequence", "geometric"))
    bounds = [(rule.name, rule.lower, rule.upper) for rule in settings.rules]
    assert bounds == [
        ("token_k1", pytest.approx(-math.log(4)), pytest.approx(math.log(2))),  # of minus the log-ratio
        ("seq_mean_k3", -math.inf, 0.01),
        ("seq_sum_k1", pytest.approx(-math.log(2)), pytest.approx(math.log(2))),
    ]
    assert settings.log_veto == math.log(0.25)
    assert (settings.nonfinite, settings.full, settings.tests_misalignment) == (
        "reject_sequence",
        False,
        True,
    )
