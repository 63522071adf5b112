"""The records of losses and estimators: their options exist, and their formulas use what they name."""

import re

import pytest
from pydantic import ValidationError

from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, RatioOptions
from verl_rc.config.models import ActorConfig

ACTOR = ActorConfig(ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.2)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_option_of_a_loss_has_a_value_and_a_symbol_in_its_formula(name: str) -> None:
    spec = POLICY_LOSSES[name]
    for option in spec.options:
        assert (option.value(ACTOR) is None) == option.is_required
        assert re.search(rf"(?<!\w){option.symbol}(?!\w)", spec.formula), option
    assert set(spec.only_negative) <= set(spec.options)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_option_of_an_estimator_exists_and_another_name_is_known(name: str) -> None:
    spec = ADVANTAGE_ESTIMATORS[name]
    assert set(spec.options) <= set(AlgorithmConfig.model_fields)
    assert spec.same_as is None or ADVANTAGE_ESTIMATORS[spec.same_as].formula == spec.formula


def test_clip_ratio_stands_for_the_bounds_that_are_null() -> None:
    assert RatioOptions(clip_ratio=0.1, clip_ratio_high=0.28).clip_bounds == (0.1, 0.28)
    assert RatioOptions(clip_ratio_low=0.0).clip_bounds == (0.0, 0.2)


def test_a_band_of_covariances_must_not_be_empty() -> None:
    with pytest.raises(ValidationError, match=r"clip_cov_lb must be below clip_cov_ub, got 5\.0 and 5\.0"):
        ActorConfig.model_validate({"ppo_micro_batch_size_per_gpu": 1, "policy_loss": {"clip_cov_lb": 5.0}})
