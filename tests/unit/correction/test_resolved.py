"""A configuration read once."""

import pytest

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.resolved import ResolvedCorrection


@pytest.mark.parametrize(
    ("level", "by_token", "by_row"),
    [
        (None, False, False),
        ("token", True, False),
        ("prefix", True, False),
        ("sequence", False, True),
        ("geometric", False, True),
    ],
)
def test_levels(level: str | None, by_token: bool, by_row: bool) -> None:
    resolved = ResolvedCorrection.of(RolloutCorrectionConfig.model_validate({"rollout_is": level}))
    assert (resolved.has_token_weights, resolved.has_row_weights) == (by_token, by_row)
    assert (resolved.threshold is None) == (level is None)


def test_a_mapping_of_fields_will_do() -> None:
    fields = {"rollout_is": "token", "rollout_is_threshold": "0.5_5"}
    assert ResolvedCorrection.of(fields) == ResolvedCorrection.of(RolloutCorrectionConfig.model_validate(fields))
    with pytest.raises(ValueError, match="rollout_si"):
        ResolvedCorrection.of({"rollout_si": "token"})
