"""The names that the configuration knows are those that are registered."""

from verl_rc.advantage import advantage_estimator_names
from verl_rc.config.actor import POLICY_LOSSES
from verl_rc.config.algorithm import ADVANTAGE_ESTIMATORS
from verl_rc.config.refused import NOT_BUILT
from verl_rc.losses import policy_loss_names

REFUSED = {row.key.rpartition(".")[2]: row.is_refused for row in NOT_BUILT}


def test_every_registered_estimator_is_known_or_refused() -> None:
    registered = set(advantage_estimator_names())
    assert set(ADVANTAGE_ESTIMATORS) == {name for name in registered if not REFUSED["adv_estimator"](name)}


def test_every_registered_policy_loss_is_known_or_refused() -> None:
    registered = set(policy_loss_names()) - {"reinforce"}  # chosen by rollout_correction.loss_type in bypass mode
    assert set(POLICY_LOSSES) == {name for name in registered if not REFUSED["loss_mode"](name)}
