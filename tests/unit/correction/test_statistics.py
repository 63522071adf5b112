"""Statistics do not depend on how rows are cut, ordered or padded; they merge with their like and over
ranks."""

import pytest
import torch
from appendix_a import random_case
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import measure


def test_two_vectors_carry_everything_through_a_reduction() -> None:
    for diagnostics in ("core", "full"):
        config = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "diagnostics": diagnostics})
        train, rollout, mask = random_case(6, 4, seed=2)
        one, two = (
            measure(train[part], rollout[part], mask[part], config) for part in (slice(0, 3), slice(3, 6))
        )
        reduced = one.with_vectors(one.sums + two.sums, torch.maximum(one.maxima, two.maxima))
        assert reduced.metrics(config) == pytest.approx(one.merge(two).metrics(config), nan_ok=True)


def test_statistics_of_different_configurations_do_not_merge() -> None:
    case = random_case(2, 3, seed=1)
    plain, weighted = (
        measure(*case, RolloutCorrectionConfig()),
        measure(*case, RolloutCorrectionConfig(rollout_is="token")),
    )
    with pytest.raises(ValueError, match="only when one configuration measured both"):
        plain.merge(weighted)


def test_the_same_rules_in_another_order_do_not_merge() -> None:
    case = random_case(2, 3, seed=1)
    fields = {"rollout_rs_threshold": 0.5}
    one, two = (
        measure(*case, {**fields, "rollout_rs": rules})
        for rules in ("token_k2,token_k3", "token_k3,token_k2")
    )
    with pytest.raises(ValueError, match="only when one configuration measured both"):
        one.merge(two)


CONFIGS = [
    RolloutCorrectionConfig(),
    RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_2.0", diagnostics="full"),
    RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.6_1.6,0.1"
    ),
    RolloutCorrectionConfig(
        rollout_is="geometric", rollout_rs="seq_max_k2", rollout_rs_threshold=1.0, diagnostics="full"
    ),
]


def assert_same(actual: dict[str, float], expected: dict[str, float]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        rounding = 1e-7 if name.endswith("_std") else 1e-11  # roots of what rounding leaves of a difference
        assert actual[name] == pytest.approx(value, rel=1e-9, abs=rounding, nan_ok=True), name


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 6), index=st.integers(0, len(CONFIGS) - 1))
def test_a_batch_is_the_merge_of_its_parts(seed: int, cut: int, index: int) -> None:
    train, rollout, mask = random_case(6, 5, seed)
    config = CONFIGS[index]
    first = measure(train[:cut], rollout[:cut], mask[:cut], config)
    second = measure(train[cut:], rollout[cut:], mask[cut:], config)
    assert_same(first.merge(second).metrics(config), measure(train, rollout, mask, config).metrics(config))


@given(seed=st.integers(0, 10_000), index=st.integers(0, len(CONFIGS) - 1))
def test_order_padding_and_empty_rows_do_not_count(seed: int, index: int) -> None:
    train, rollout, mask = random_case(5, 4, seed)
    config = CONFIGS[index]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    wider = [
        torch.nn.functional.pad(x[order], (0, 3, 0, 2), value=v)
        for x, v in ((train, -9.0), (rollout, float("nan")))
    ]
    wider_mask = torch.nn.functional.pad(mask[order], (0, 3, 0, 2))
    assert_same(
        measure(*wider, wider_mask, config).metrics(config),
        measure(train, rollout, mask, config).metrics(config),
    )
