"""Tags of a configuration."""

import pytest
from planned_runs import config_of

from verl_rc.metrics.sinks.wandb_sink import run_tags

CORRECTION = "algorithm.rollout_correction"


def tags_of(given):
    return run_tags(config_of(given).model_dump(mode="json"))


def test_a_plain_run_names_estimator_loss_and_that_nothing_is_corrected():
    assert {"grpo", "ppo-clip", "decoupled", "uncorrected"} <= set(tags_of({}))


@pytest.mark.parametrize(
    ("given", "present", "absent"),
    [
        ({f"{CORRECTION}.rollout_is": "sequence"}, {"decoupled", "is-sequence"}, {"uncorrected", "bypass"}),
        ({f"{CORRECTION}.bypass_mode": True}, {"bypass"}, {"decoupled"}),
        (
            {f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0,1.0"},
            {"rs-token_k1", "rs-seq_max_k2"},
            {"uncorrected"},
        ),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, {"gspo"}, {"ppo-clip"}),
        ({"actor_rollout_ref.rollout.quantization": "fp8_per_channel"}, {"engine-fp8_per_channel"}, {"engine-bfloat16"}),
        ({"actor_rollout_ref.rollout.kv_cache_dtype": "fp8"}, {"kv-cache-fp8", "engine-bfloat16"}, set()),
        ({"actor_rollout_ref.model.lora_rank": 8}, {"lora-8"}, set()),
        ({"algorithm.filter_groups.enable": True}, {"dynamic-sampling"}, set()),
        ({"actor_rollout_ref.model.path": "models/Qwen2.5-7B"}, {"Qwen2.5-7B"}, {"models/Qwen2.5-7B"}),
    ],
)
def test_what_a_run_is_about_becomes_a_tag(given, present, absent):
    tags = set(tags_of(given))
    assert present <= tags
    assert not absent & tags


def test_tags_are_short_enough_for_wandb_and_there_once():
    tags = run_tags({"actor_rollout_ref": {"model": {"path": "m" * 100}}, "algorithm": {"adv_estimator": "m" * 80}})
    assert tags == ["m" * 64]


def test_a_run_without_these_sections_has_no_tags():
    assert run_tags({"model": {"path": "x"}, "trainer": {"seed": 1}}) == []
