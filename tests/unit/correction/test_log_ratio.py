"""Log-ratios: train minus rollout, zero where nothing counts."""

import pytest
import torch
from appendix_a import rows

from verl_rc.correction.log_ratio import LogRatio


@pytest.mark.parametrize("masked", [float("nan"), float("-inf"), 5.0])
def test_values_are_train_minus_rollout_whatever_lies_on_padding(masked: float) -> None:
    ratio = LogRatio.from_log_probs(*rows(masked))
    expected = [[0.1, -0.1, 0.3, 0.0], [-2.0, 0.2, 0.0, 0.0], [0.0, -0.3, 0.0, 0.2]]
    torch.testing.assert_close(ratio.values, torch.tensor(expected, dtype=torch.float64))
    assert ratio.lengths.tolist() == [4, 3, 3]


def test_divergences_of_the_appendix() -> None:
    ratio = LogRatio.from_log_probs(*rows())
    k3 = [[0.005171, 0.004837, 0.049859, 0.0], [1.135335, 0.021403, 0.0, 0.0], [0.0, 0.040818, 0.0, 0.021403]]
    torch.testing.assert_close(
        ratio.divergence("k3"), torch.tensor(k3, dtype=torch.float64), rtol=0, atol=1e-6
    )
    k2 = [[0.005, 0.005, 0.045, 0.0], [2.0, 0.02, 0.0, 0.0], [0.0, 0.045, 0.0, 0.02]]
    torch.testing.assert_close(ratio.divergence("k2"), torch.tensor(k2, dtype=torch.float64))


def test_a_token_without_a_finite_log_prob_is_not_valid() -> None:
    train, rollout, mask = rows()
    rollout[0, 1] = float("-inf")
    ratio = LogRatio.from_log_probs(train, rollout, mask)
    assert ratio.valid[0].tolist() == [1, 0, 1, 1]
    assert ratio.response.sum(dim=-1).tolist() == [4, 3, 3]
