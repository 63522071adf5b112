"""The run stops when too many log-probs are not finite."""

import pytest

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.finite import NonFiniteLogProbError, require_finite

METRICS = {"rollout_corr/nonfinite_token_fraction": 0.02}


def test_the_configured_share_decides() -> None:
    require_finite(METRICS, RolloutCorrectionConfig(nonfinite_stop_fraction=0.02))
    with pytest.raises(NonFiniteLogProbError, match=r"at most 1\.00% .* got 2\.00%"):
        require_finite(METRICS, RolloutCorrectionConfig())


def test_raise_allows_none() -> None:
    with pytest.raises(NonFiniteLogProbError, match=r"at most 0\.00%"):
        require_finite(METRICS, RolloutCorrectionConfig(nonfinite_logprob="raise"))
