"""Facts that follow from the section: the order, the largest age, the groups in memory."""

from fractions import Fraction
from typing import Any

import pytest
from pydantic import ValidationError

from verl_rc.config.async_training import AsyncTrainingConfig


def options(**given: Any) -> AsyncTrainingConfig:
    short = {"k": "staleness_threshold", "K": "max_off_policy_threshold", "M": "trigger_parameter_sync_step"}
    return AsyncTrainingConfig.model_validate({short.get(name, name): value for name, value in given.items()})


def test_the_default_is_the_synchronous_run() -> None:
    default = options()
    assert default.is_synchronous
    assert (default.resolved_order, default.oldest, default.groups_in_memory(512)) == ("admitted", 0, 512)


# From the specification's table of ages: k = 1 is one step off; four steps a publication are 0 to 3 steps
# old, as PPO's mini-batches are; by completion, K = k + 1.
FACTS = [
    (options(k=1, partial_rollout=False), "admitted", 1, 16),
    (options(k=3, partial_rollout=False), "admitted", 3, 32),
    (options(M=4, partial_rollout=False), "admitted", 3, 32),
    (options(M=4), "ready", 3, 32),
    (options(k=1), "ready", 2, 16),
    (options(k=1, K=1), "ready", 1, 16),
    (options(k=2, K=3), "ready", 3, 24),
    (options(k=0.5, M=4, K=1), "ready", 7, 48),
    (options(k=0.5, M=4, order="admitted"), "admitted", 5, 48),
    (
        options(k=0.5, order="ready", partial_rollout=False),
        "ready",
        1,
        12,
    ),  # whole responses keep k by themselves
    (options(k=1, M=2, order="ready", partial_rollout=False), "ready", 3, 32),
    (options(k=1, deterministic_steps=50), "admitted", 1, 16),
    (options(k=0.1, M=10), "ready", 20, 88),
]


@pytest.mark.parametrize(("config", "order", "oldest", "groups"), FACTS, ids=[repr(row[0]) for row in FACTS])
def test_order_age_and_memory(config: AsyncTrainingConfig, order: str, oldest: int, groups: int) -> None:
    assert not config.is_synchronous
    assert (config.resolved_order, config.oldest, config.groups_in_memory(8)) == (order, oldest, groups)


def test_a_tenth_is_a_tenth() -> None:
    """In floats 7 * (1 + 0.1) * 10 is 77.00000000000001, and 78 groups would be admitted."""
    assert options(k=0.1, M=7).staleness == Fraction(1, 10)
    assert options(k=0.1, M=7).groups_in_memory(10) == 77


@pytest.mark.parametrize(
    ("every", "asked", "rounded"), [(1, 3, 3), (4, 3, 4), (4, 8, 8), (4, -1, -1), (4, 0, 0)]
)
def test_a_frequency_is_rounded_up_to_steps_that_publish(every: int, asked: int, rounded: int) -> None:
    assert options(M=every).rounded_to_publications(asked) == rounded


@pytest.mark.parametrize(
    "given", [{"k": -1}, {"K": -0.5}, {"M": 0}, {"require_batches": 0}, {"order": "newest"}]
)
def test_values_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options(**given)
