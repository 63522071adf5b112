"""The reference's section: needed only where something compares with it, and following the actor where it is left open."""

from pathlib import Path

import pytest
from small_models import small_run_config


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("algorithm.use_kl_in_reward=True", True),
        ("actor_rollout_ref.actor.use_kl_loss=True", True),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", False),
    ],
)
def test_it_is_needed_where_something_compares_with_it(override: str, needed: bool) -> None:
    config = small_run_config(Path("/models/m"), override)
    assert config.needs_reference is needed
    assert config.num_trainer_roles == 1 + needed


def test_with_lora_the_actor_itself_is_the_reference() -> None:
    config = small_run_config(
        Path("/models/m"), "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=4"
    )
    assert config.needs_reference
    assert config.num_trainer_roles == 1


def test_what_is_left_open_follows_the_actor() -> None:
    reference = small_run_config(Path("/models/m")).actor_rollout_ref.ref
    assert reference.model_path == "/models/m"
    assert reference.log_prob_micro_batch_size_per_gpu == 2
    other = small_run_config(Path("/models/m"), "actor_rollout_ref.ref.model_path=/models/other").actor_rollout_ref.ref
    assert other.model_path == "/models/other"
