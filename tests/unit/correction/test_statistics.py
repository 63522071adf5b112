"""Statistics merge only with their like, and survive a reduction over ranks."""

import pytest
import torch
from appendix_a import random_case

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import measure


def test_an_all_reduce_of_its_tensors_equals_merging() -> None:
    config = RolloutCorrectionConfig(rollout_is="token", diagnostics="full")
    train, rollout, mask = random_case(6, 4, seed=1)
    one, two = (measure(train[part], rollout[part], mask[part], config) for part in (slice(0, 2), slice(2, 6)))
    reduced = one.with_tensors(one.sums + two.sums, torch.maximum(one.maxima, two.maxima), one.histogram + two.histogram)
    assert reduced.metrics(config) == pytest.approx(one.merge(two).metrics(config), nan_ok=True)


def test_two_vectors_carry_everything_through_a_reduction() -> None:
    for diagnostics in ("core", "full"):
        config = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "diagnostics": diagnostics})
        train, rollout, mask = random_case(6, 4, seed=2)
        one, two = (measure(train[part], rollout[part], mask[part], config) for part in (slice(0, 3), slice(3, 6)))
        vectors = list(zip(one.to_vectors(), two.to_vectors(), strict=True))
        reduced = one.with_vectors(vectors[0][0] + vectors[0][1], torch.maximum(*vectors[1]))
        assert reduced.metrics(config) == pytest.approx(one.merge(two).metrics(config), nan_ok=True)


def test_statistics_of_different_configurations_do_not_merge() -> None:
    case = random_case(2, 3, seed=1)
    plain, weighted = measure(*case, RolloutCorrectionConfig()), measure(*case, RolloutCorrectionConfig(rollout_is="token"))
    with pytest.raises(ValueError, match="only when one configuration measured both"):
        plain.merge(weighted)
