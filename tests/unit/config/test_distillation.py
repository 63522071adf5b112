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


def test_several_teachers_have_a_data_source_each() -> None:
    further = "+distillation.teacher_models.second.model_path=org/second"
    with pytest.raises(ConfigError, match=r"model\.key=None, .*second\.key=None; pass .*=<data_source>"):
        taught(further)
    key = "+distillation.teacher_models.second.key"
    with pytest.raises(ConfigError, match=r"teacher_model\.key=math, .*second\.key=math"):
        taught(further, f"{TEACHER}.key=math", f"{key}=math")
    config = taught(further, f"{TEACHER}.key=math", f"{key}=code", "distillation.teacher_key=data_source")
    policies = config.frozen_policies
    assert {role: policy.path_key for role, policy in policies.items()} == {
        "teacher teacher_model": f"{TEACHER}.model_path",
        "teacher second": "distillation.teacher_models.second.model_path",
    }
    assert config.sequence_parallel_sizes == dict.fromkeys(["actor", *policies], 1)
    with pytest.raises(ConfigError, match="a teacher gets rows by data_source"):
        taught("distillation.teacher_key=language")
    with pytest.raises(ConfigError, match="no engine serves the teacher"):
        taught(further, "+distillation.teacher_models.second.inference.name=vllm")
