"""A teacher is one more frozen policy: its keys arrive where those of the reference policy do."""

from pathlib import Path

import pytest
from small_models import small_run_config

from verl_rc.algorithm.ppo.choices import log_prob_limit
from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig

TEACHER, LOSS = "distillation.teacher_models.teacher_model", "distillation.distillation_loss"


def taught(*overrides: str) -> RunConfig:
    path = f"{TEACHER}.model_path=org/teacher"
    return small_run_config(Path("/models/student"), "distillation.enabled=True", path, *overrides)


def test_without_a_teacher_there_is_none() -> None:
    config = small_run_config(Path("/models/student"), f"{TEACHER}.model_path=org/teacher")
    assert config.frozen_policies == {}
    assert config.distillation.loss is None


def test_a_teacher_has_a_model_of_its_own_also_with_lora_beside_a_reference() -> None:
    config = taught("actor_rollout_ref.actor.use_kl_loss=True")
    assert list(config.frozen_policies) == ["reference", "teacher"]
    assert list(taught("actor_rollout_ref.model.lora_rank=4").frozen_policies) == ["teacher"]
    assert config.frozen_policies["teacher"].model_path == "org/teacher"
    assert config.models[f"{TEACHER}.model_path"] == ("org/teacher", False)


def test_the_teacher_is_sharded_and_scores_as_the_reference() -> None:
    config = taught("actor_rollout_ref.ref.fsdp_config.dtype=float16")
    assert config.fsdp_configs["teacher"].dtype == "float16"
    assert log_prob_limit(config.frozen_policies["teacher"].config).max_rows == 2
    with pytest.raises(ConfigError, match=r"write actor_rollout_ref\.ref\.fsdp_config"):
        taught(f"{TEACHER}.fsdp_config.dtype=float16")


def test_clip_ranges_follow_the_common_one() -> None:
    loss = taught(f"{LOSS}.clip_ratio=0.3", f"{LOSS}.clip_ratio_high=0.4").distillation.distillation_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.3, 0.4)


def test_an_older_name_of_verl_means_the_same() -> None:
    old = ["distillation.enabled=True", "distillation.teacher_model.model_path=org/teacher"]
    assert small_run_config(Path("/models/student"), *old) == taught()
