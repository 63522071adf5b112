"""A teacher is one more frozen policy: its keys arrive where those of the reference policy do."""

from pathlib import Path
from typing import Any

import pytest
from small_models import small_run_config

from verl_rc.algorithm.ppo.choices import log_prob_limit
from verl_rc.config.run import FSDP_SECTIONS, RunConfig

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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fsdp_size", 1),
        ("model_dtype", "bfloat16"),
        ("dtype", "float16"),
        ("reshard_after_forward", False),
        ("param_offload", True),
        ("ulysses_sequence_parallel_size", 1),
    ],
)
def test_sharding_and_precision_are_the_teachers_own(key: str, value: Any) -> None:
    config = taught(f"{TEACHER}.fsdp_config.{key}={value}")
    assert getattr(config.fsdp_configs["teacher"], key) == value
    assert FSDP_SECTIONS["teacher"] == f"{TEACHER}.fsdp_config"


def test_micro_batches_are_the_actors_unless_the_teacher_has_others() -> None:
    follows = taught().frozen_policies["teacher"].config
    assert log_prob_limit(follows).max_rows == 2
    own = taught(f"{TEACHER}.log_prob_micro_batch_size_per_gpu=1").frozen_policies["teacher"].config
    assert log_prob_limit(own).max_rows == 1
    by_tokens = ("log_prob_use_dynamic_bsz=True", "log_prob_max_token_len_per_gpu=77")
    filled = taught(*(f"{TEACHER}.{key}" for key in by_tokens)).frozen_policies["teacher"].config
    assert log_prob_limit(filled).max_tokens == 77


def test_clip_ranges_follow_the_common_one() -> None:
    loss = taught(f"{LOSS}.clip_ratio=0.3", f"{LOSS}.clip_ratio_high=0.4").distillation.distillation_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.3, 0.4)


def test_an_older_name_of_verl_means_the_same() -> None:
    old = ["distillation.enabled=True", "distillation.teacher_model.model_path=org/teacher"]
    assert small_run_config(Path("/models/student"), *old) == taught()
