"""Which loss runs, and what it has to know of its mini-batch first."""

import pytest

from verl_rc.config.actor import ActorConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.ppo.choices import covariance_loss_name, needs_statistics_first, policy_loss_name

DECOUPLED = RolloutCorrectionConfig()
REINFORCE = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce")


def actor(loss_mode: str) -> ActorConfig:
    return ActorConfig.model_validate({"use_dynamic_bsz": True, "policy_loss": {"loss_mode": loss_mode}})


@pytest.mark.parametrize(
    ("loss_mode", "correction", "name", "looks_at_covariances"),
    [
        ("vanilla", DECOUPLED, "vanilla", False),
        ("kl_cov", DECOUPLED, "kl_cov", True),
        ("clip_cov", DECOUPLED, "clip_cov", True),
        ("kl_cov", REINFORCE, "reinforce", False),
    ],
)
def test_the_loss_that_runs(
    loss_mode: str, correction: RolloutCorrectionConfig, name: str, looks_at_covariances: bool
) -> None:
    assert policy_loss_name(actor(loss_mode), correction) == name
    assert covariance_loss_name(actor(loss_mode), correction) == (name if looks_at_covariances else None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"rollout_is": "token"}, False),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, True),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2", "rejection_denominator": "kept"}, True),
    ],
)
def test_who_needs_the_whole_mini_batch_first(fields: dict[str, object], expected: bool) -> None:
    correction = RolloutCorrectionConfig.model_validate({"bypass_mode": True, "loss_type": "reinforce", **fields})
    assert needs_statistics_first(correction) == expected
