"""Models of a run: where they come from, which are needed, and that what is left open follows the actor."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from small_models import small_run_config

from verl_rc.config.load import load_run_config
from verl_rc.config.models import CriticConfig, model_source


def test_a_folder_of_the_users_home_is_found_and_a_hub_id_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_source("~/model") == str(tmp_path / "model")
    assert model_source("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


GIVEN = [
    "data.train_files=a.parquet",
    "data.val_files=b.parquet",
    "data.train_batch_size=64",
    "actor_rollout_ref.model.path=org/model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.loss_agg_mode=token-sum",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n=2",
]


def test_what_a_critic_leaves_open_follows_the_actor() -> None:
    critic = load_run_config([*GIVEN, "critic.ppo_mini_batch_size=16"]).critic
    assert critic.ppo_mini_batch_size == 16
    assert (critic.ppo_micro_batch_size_per_gpu, critic.loss_agg_mode, critic.model.path) == (
        4,
        "token-sum",
        "org/model",
    )
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


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("algorithm.use_kl_in_reward=True", True),
        ("actor_rollout_ref.actor.use_kl_loss=True", True),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", False),
    ],
)
def test_a_reference_is_needed_where_something_compares_with_it(override: str, needed: bool) -> None:
    config = small_run_config(Path("/models/m"), override)
    assert config.needs_reference is needed
    assert len(config.fsdp_configs) == 1 + needed


def test_roles_share_the_processes_of_the_ranks() -> None:
    roles = ("actor_rollout_ref.actor.use_kl_loss=True", "critic.enable=True")
    ranks = (
        "trainer.n_gpus_per_node=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    config = small_run_config(Path("/models/m"), *roles, *ranks)
    assert (len(config.fsdp_configs), config.num_engines) == (3, 4)
    assert config.num_processes == 8


def test_with_lora_the_actor_itself_is_the_reference() -> None:
    config = small_run_config(
        Path("/models/m"), "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=4"
    )
    assert config.needs_reference
    assert len(config.fsdp_configs) == 1


def test_what_a_reference_leaves_open_follows_the_actor() -> None:
    reference = small_run_config(Path("/models/m")).actor_rollout_ref.ref
    assert reference.model_path == "/models/m"
    assert reference.log_prob_micro_batch_size_per_gpu == 2
    other = small_run_config(
        Path("/models/m"), "actor_rollout_ref.ref.model_path=/models/other"
    ).actor_rollout_ref.ref
    assert other.model_path == "/models/other"
