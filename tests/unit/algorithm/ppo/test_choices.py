"""Which loss runs, what it has to know of its mini-batch first, and how much a forward pass of each role
holds."""

from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.algorithm.ppo.choices import (
    log_prob_limit,
    mini_batch_loss_name,
    needs_statistics_first,
    policy_loss_name,
    update_limit,
)
from verl_rc.config.models import ActorConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.run import RunConfig
from verl_rc.records.microbatch import MicroBatchLimit

DECOUPLED = RolloutCorrectionConfig()
REINFORCE = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce")


def actor(loss_mode: str) -> ActorConfig:
    return ActorConfig.model_validate({"use_dynamic_bsz": True, "policy_loss": {"loss_mode": loss_mode}})


@pytest.mark.parametrize(
    ("loss_mode", "correction", "name", "reads_mini_batch"),
    [
        ("vanilla", DECOUPLED, "vanilla", False),
        ("kl_cov", DECOUPLED, "kl_cov", True),
        ("clip_cov", DECOUPLED, "clip_cov", True),
        ("m2po", DECOUPLED, "m2po", True),
        ("bapo", DECOUPLED, "bapo", True),
        ("kl_cov", REINFORCE, "reinforce", False),
        ("kl_cov", RolloutCorrectionConfig.from_preset("topr"), "topr", False),
    ],
)
def test_the_loss_that_runs(
    loss_mode: str, correction: RolloutCorrectionConfig, name: str, reads_mini_batch: bool
) -> None:
    assert policy_loss_name(actor(loss_mode), correction) == name
    assert mini_batch_loss_name(actor(loss_mode), correction) == (name if reads_mini_batch else None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"rollout_is": "token"}, False),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, True),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2", "rejection_denominator": "kept"},
            True,
        ),
    ],
)
def test_who_needs_the_whole_mini_batch_first(fields: dict[str, object], expected: bool) -> None:
    correction = RolloutCorrectionConfig.model_validate(
        {"bypass_mode": True, "loss_type": "reinforce", **fields}
    )
    assert needs_statistics_first(correction) == expected


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def limits(config: RunConfig) -> list[MicroBatchLimit]:
    policy = config.actor_rollout_ref
    return [
        update_limit(policy.actor),
        log_prob_limit(policy.rollout),
        log_prob_limit(policy.ref),
        update_limit(config.critic),
    ]


@pytest.mark.parametrize("by_tokens", [True, False])
def test_every_role_follows_the_actor(by_tokens: bool) -> None:
    overrides = (f"{ACTOR}.use_dynamic_bsz={by_tokens}", f"{ACTOR}.ppo_max_token_len_per_gpu=70")
    config = small_run_config(
        Path("unused"),
        *overrides,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        "critic.ppo_max_token_len_per_gpu=70",
    )
    expected = MicroBatchLimit(max_tokens=70) if by_tokens else MicroBatchLimit(max_rows=3)
    assert limits(config) == [expected] * 4


def test_roles_may_differ() -> None:
    config = small_run_config(
        Path("unused"),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=40",
        "critic.ppo_micro_batch_size_per_gpu=7",
    )
    found = limits(config)
    rows = {0: 2, 1: 5, 3: 7}
    assert found == [
        MicroBatchLimit(max_tokens=40) if i == 2 else MicroBatchLimit(max_rows=rows[i]) for i in range(4)
    ]
