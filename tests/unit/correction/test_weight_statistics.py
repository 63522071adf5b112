"""Row-level weights: what the tokens of a row share, or their mean."""

import pytest
from appendix_a import rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction


@pytest.mark.parametrize(("level", "largest", "smallest"), [("token", 1.052502, 0.778445), ("sequence", 1.2, 0.165299)])
def test_extreme_row_means_of_the_appendix(level: str, largest: float, smallest: float) -> None:
    config = RolloutCorrectionConfig.model_validate({"rollout_is": level, "rollout_is_threshold": 1.2})
    metrics = compute_rollout_correction(*rows(), config).metrics()
    assert metrics["rollout_corr/rollout_is_seq_max"] == pytest.approx(largest, abs=2e-6)
    assert metrics["rollout_corr/rollout_is_seq_min"] == pytest.approx(smallest, abs=2e-6)
