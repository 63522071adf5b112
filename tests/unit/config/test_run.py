"""The whole tree: fallbacks are followed once, nothing is shared between runs, the hash sees every value."""

import pytest
from pydantic import ValidationError

from verl_rc.config.run import FALLBACKS, RunConfig
from verl_rc.config.schema import known_keys

GIVEN = {
    "data": {"train_files": "a", "val_files": "b", "max_response_length": 77},
    "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"ppo_micro_batch_size_per_gpu": 3}},
}


def test_values_follow_their_sources_unless_given() -> None:
    config = RunConfig.model_validate(GIVEN)
    assert config.actor_rollout_ref.rollout.response_length == 77
    assert config.actor_rollout_ref.actor.loss_scale_factor == 77
    assert config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 3
    assert config.trainer.default_local_dir == "checkpoints/verl_rc/default"
    given = {**GIVEN, "actor_rollout_ref": {**GIVEN["actor_rollout_ref"], "rollout": {"response_length": 5}}}
    assert RunConfig.model_validate(given).actor_rollout_ref.rollout.response_length == 5


def test_runs_share_nothing() -> None:
    first = RunConfig.model_validate(GIVEN)
    other = {**GIVEN, "data": {**GIVEN["data"], "max_response_length": 5}}
    assert RunConfig.model_validate(other).actor_rollout_ref.rollout.response_length == 5
    assert first.actor_rollout_ref.rollout.response_length == 77


def test_every_fallback_names_keys_that_exist() -> None:
    assert {key for pair in FALLBACKS for key in pair} <= set(known_keys(RunConfig))


def test_the_tree_is_frozen_and_closed() -> None:
    config = RunConfig.model_validate(GIVEN)
    with pytest.raises(ValidationError, match="frozen"):
        config.data.shuffle = False  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        RunConfig.model_validate({**GIVEN, "surplus": 1})
