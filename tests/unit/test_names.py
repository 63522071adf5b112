"""The names that the configuration knows are those that are registered."""

from collections.abc import Iterable

from verl_rc.advantage import advantage_estimator_names
from verl_rc.config.actor import POLICY_LOSSES
from verl_rc.config.algorithm import ADVANTAGE_ESTIMATORS
from verl_rc.losses import policy_loss_names


def built_in(names: Iterable[str]) -> set[str]:
    """Without what other tests register."""
    return {name for name in names if not name.endswith("_for_test")}


def test_the_known_estimators_are_the_registered_ones() -> None:
    assert set(ADVANTAGE_ESTIMATORS) == built_in(advantage_estimator_names())


def test_the_known_policy_losses_are_the_registered_ones() -> None:
    chosen_otherwise = {"reinforce"}  # by rollout_correction.loss_type in bypass mode
    assert set(POLICY_LOSSES) == built_in(policy_loss_names()) - chosen_otherwise
