"""The critic's section: what it leaves open follows the actor."""

import pytest
from pydantic import ValidationError

from verl_rc.config.load import load_run_config
from verl_rc.config.models import CriticConfig

GIVEN = [
    "data.train_files=a.parquet",
    "data.val_files=b.parquet",
    "data.train_batch_size=64",
    "actor_rollout_ref.model.path=org/model",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.loss_agg_mode=token-sum",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n=2",
]


def test_what_is_left_open_follows_the_actor() -> None:
    critic = load_run_config([*GIVEN, "critic.ppo_mini_batch_size=16"]).critic
    assert critic.ppo_mini_batch_size == 16
    assert (critic.ppo_micro_batch_size_per_gpu, critic.loss_agg_mode, critic.model.path) == (4, "token-sum", "org/model")
    assert critic.model.use_remove_padding is False
    assert critic.optim.lr == 1e-5


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["algorithm.adv_estimator=gae"], True),
        (["algorithm.adv_estimator=grpo"], False),
        (["algorithm.adv_estimator=grpo", "critic.enable=True"], True),
    ],
)
def test_a_critic_is_trained_where_values_are_needed(overrides: list[str], needed: bool) -> None:
    assert load_run_config([*GIVEN, *overrides]).needs_critic is needed


def test_a_clip_range_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="cliprange_value"):
        CriticConfig(cliprange_value=0.0)
