"""Each role's limit: by tokens or by rows, its own or the actor's."""

from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.data.microbatch import MicroBatchLimit
from verl_rc.ppo.micro_batch_limits import actor_limit, critic_limit, log_prob_limit, reference_limit

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LIMITS = [actor_limit, log_prob_limit, reference_limit, critic_limit]


@pytest.mark.parametrize("by_tokens", [True, False])
def test_every_role_follows_the_actor(by_tokens: bool) -> None:
    overrides = (f"{ACTOR}.use_dynamic_bsz={by_tokens}", f"{ACTOR}.ppo_max_token_len_per_gpu=70")
    config = small_run_config(
        Path("unused"), *overrides, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3", "critic.ppo_max_token_len_per_gpu=70"
    )
    expected = MicroBatchLimit(max_tokens=70) if by_tokens else MicroBatchLimit(max_rows=3)
    assert [limit(config) for limit in LIMITS] == [expected] * 4


def test_roles_may_differ() -> None:
    config = small_run_config(
        Path("unused"),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=40",
        "critic.ppo_micro_batch_size_per_gpu=7",
    )
    found = [limit(config) for limit in LIMITS]
    rows = {0: 2, 1: 5, 3: 7}
    assert found == [MicroBatchLimit(max_tokens=40) if i == 2 else MicroBatchLimit(max_rows=rows[i]) for i in range(4)]
