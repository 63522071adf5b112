"""The whole tree: fallbacks followed once, nothing shared between runs; code of a model runs only where it is
allowed."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from small_models import small_run_config

from verl_rc.config.run import FOLLOWED_KEYS, RayInitConfig, RunConfig, remote_code_keys
from verl_rc.config.schema import fields_of

GIVEN = {
    "data": {"train_files": "a", "val_files": "b", "max_response_length": 77},
    "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"ppo_micro_batch_size_per_gpu": 3}},
}


def test_values_follow_their_sources_unless_given() -> None:
    config = RunConfig.model_validate(GIVEN)
    assert config.actor_rollout_ref.actor.loss_scale_factor == 77
    assert config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 3
    assert config.trainer.default_local_dir == "checkpoints/verl_rc/default"
    actor = {**GIVEN["actor_rollout_ref"]["actor"], "loss_scale_factor": 5}
    given = {**GIVEN, "actor_rollout_ref": {**GIVEN["actor_rollout_ref"], "actor": actor}}
    assert RunConfig.model_validate(given).actor_rollout_ref.actor.loss_scale_factor == 5


def test_runs_share_nothing() -> None:
    first = RunConfig.model_validate(GIVEN)
    other = {**GIVEN, "data": {**GIVEN["data"], "max_response_length": 5}}
    assert RunConfig.model_validate(other).actor_rollout_ref.actor.loss_scale_factor == 5
    assert first.actor_rollout_ref.actor.loss_scale_factor == 77


def test_every_followed_key_exists() -> None:
    assert set(FOLLOWED_KEYS.values()) <= set(fields_of(RunConfig))


def test_the_tree_is_frozen_and_closed() -> None:
    config = RunConfig.model_validate(GIVEN)
    with pytest.raises(ValidationError, match="frozen"):
        config.data.shuffle = False  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        RunConfig.model_validate({**GIVEN, "surplus": 1})


def test_no_model_brings_code_by_default(tmp_path: Path) -> None:
    assert (
        remote_code_keys(
            small_run_config(tmp_path, "algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=True")
        )
        == {}
    )


def test_every_switch_is_named_with_its_model(tmp_path: Path) -> None:
    config = small_run_config(
        tmp_path,
        "data.trust_remote_code=True",
        "actor_rollout_ref.model.trust_remote_code=True",
        "algorithm.adv_estimator=gae",
        "critic.use_dynamic_bsz=True",
        "critic.model.path=other/critic",
        "reward.reward_model.enable=True",
        "reward.reward_model.model_path=other/judge",
        "reward.reward_model.trust_remote_code=True",
    )
    path = config.actor_rollout_ref.model.path
    assert remote_code_keys(config) == {
        "data.trust_remote_code": path,
        "actor_rollout_ref.model.trust_remote_code": path,
        "critic.model.trust_remote_code": "other/critic",  # follows the actor's
        "reward.reward_model.trust_remote_code": "other/judge",
    }


def test_variables_of_a_runtime_environment_are_text() -> None:
    config = RayInitConfig(runtime_env={"env_vars": {"A": 1, "B": 0.5, "C": True, "D": "x", "E": None}})
    assert config.runtime_env == {"env_vars": {"A": "1", "B": "0.5", "C": "1", "D": "x", "E": None}}
    for value in ({"A": [1]}, {"A": {"B": 1}}, ["A=1"]):
        with pytest.raises(ValidationError, match="env_vars"):
            RayInitConfig(runtime_env={"env_vars": value})
