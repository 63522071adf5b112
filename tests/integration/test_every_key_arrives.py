"""Every key is read where it acts, which a real run shows: each of its processes writes down what it reads,
and where."""

from pathlib import Path

import pytest

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of

SAYS_WHAT_HAPPENS_ANYWAY = {
    "actor_rollout_ref.rollout.name",
}
"""Keys that verl's recipes spell out and of which only one value is possible, or several that mean the same.
"""

TURNS, JUDGE = "actor_rollout_ref.rollout.multi_turn", "reward.reward_model"
ENVIRONMENT = "actor_rollout_ref.rollout.environment"
PENALTY, GROUPS = "reward.reward_kwargs", "algorithm.filter_groups"
SHOWN_ELSEWHERE = {
    # which reads them at once, as arguments of another library
    "tests/unit/trainer/test_every_key_arrives.py": "ray_kwargs.ray_init.address "
    "ray_kwargs.ray_init.num_cpus "
    "ray_kwargs.ray_init.num_gpus ray_kwargs.ray_init.object_store_memory ray_kwargs.ray_init.runtime_env "
    "actor_rollout_ref.rollout.gpu_memory_utilization "
    "actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.enforce_eager "
    "critic.optim.min_lr_ratio critic.optim.num_cycles actor_rollout_ref.rollout.max_support",
    # which nothing reads after the checks
    "tests/unit/config/test_async_checks.py": "async_training.require_batches",
    # an estimator of the user's own
    "tests/unit/algorithm/advantage/test_declared_inputs.py": "algorithm.adv_estimator_inputs",
    # features that the run has turned off
    "tests/unit/config/test_profiler.py": "global_profiler.profile_continuous_steps "
    "global_profiler.save_path global_profiler.ranks global_profiler.engines",
    "tests/integration/test_refreshed_reference.py": "actor_rollout_ref.ref.sync_freq",
    "tests/unit/algorithm/ppo/test_control.py": "algorithm.adaptive_entropy.max_ent_coef "
    "algorithm.adaptive_entropy.delta_ent_coef",
    "tests/unit/trainer/test_asynchronous_modes.py": "async_training.group_timeout_seconds "
    "async_training.max_off_policy_strategy async_training.partial_rollout async_training.order "
    "async_training.max_off_policy_threshold",
    "tests/unit/trainer/test_setup.py": "async_training.kv_cache_on_update",
    "tests/unit/records/test_records.py": "data.custom_cls.name",
    "tests/unit/records/test_dataset.py": "data.truncation",
    "tests/unit/runtime/workers/test_lora.py": "actor_rollout_ref.model.lora_alpha "
    "actor_rollout_ref.model.target_modules actor_rollout_ref.model.exclude_modules "
    "actor_rollout_ref.model.lora.merge actor_rollout_ref.model.lora_adapter_path",
    "tests/unit/algorithm/ppo/test_objective.py": "actor_rollout_ref.actor.kl_loss_coef "
    "actor_rollout_ref.actor.kl_loss_type "
    "algorithm.rollout_correction.score_centering.top_k algorithm.rollout_correction.score_centering.tail",
    "tests/unit/plan/run_plan/test_options.py": "distillation.distillation_loss.topk "
    "distillation.distillation_loss.log_prob_min_clamp",
    "tests/unit/runtime/rollout/test_conversation.py": f"{TURNS}.tools {TURNS}.format "
    f"{TURNS}.max_assistant_turns "
    f"{TURNS}.max_user_turns {TURNS}.max_parallel_calls {TURNS}.max_tool_response_length "
    f"{TURNS}.tool_timeout_seconds {TURNS}.tool_response_truncate_side",
    "tests/unit/runtime/rollout/test_environments.py": f"{ENVIRONMENT}.arguments {ENVIRONMENT}.choices "
    f"{ENVIRONMENT}.max_turns {ENVIRONMENT}.step_seconds {ENVIRONMENT}.max_state_megabytes",
    "tests/unit/trainer/test_environment_scores.py": f"{ENVIRONMENT}.reward",
    "tests/unit/runtime/workers/test_reward_model_worker.py": f"{JUDGE}.dtype "
    f"{JUDGE}.micro_batch_size_per_gpu "
    f"{JUDGE}.max_length {JUDGE}.n_gpus_per_node {JUDGE}.trust_remote_code",
    "tests/unit/runtime/rollout/vllm/test_reward_model.py": f"{JUDGE}.rollout.name "
    f"{JUDGE}.rollout.tensor_model_parallel_size {JUDGE}.rollout.gpu_memory_utilization",
    "tests/unit/trainer/supply/test_scored_groups.py": f"data.train_batch_size {GROUPS}.metric "
    f"{GROUPS}.max_num_gen_batches {PENALTY}.overlong_buffer_cfg.len "
    f"{PENALTY}.overlong_buffer_cfg.penalty_factor "
    f"{PENALTY}.overlong_buffer_cfg.log",
    "tests/unit/trainer/test_scoring.py": "reward.failure_score",
    "tests/unit/trainer/test_guards.py": "trainer.alerts.mismatch trainer.alerts.reward_collapse "
    "trainer.alerts.cause trainer.alerts.gap",
    # W&B, which the run does without
    "tests/unit/trainer/test_report_at_end.py": "trainer.wandb_text",
    "tests/unit/metrics/sinks/test_wandb_sink.py": "trainer.project_name trainer.experiment_name",
    # only a GPU has memory to spare
    "tests/integration/test_on_gpu.py": "actor_rollout_ref.actor.fsdp_config.param_offload "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload actor_rollout_ref.ref.fsdp_config.param_offload "
    "critic.fsdp_config.param_offload critic.fsdp_config.optimizer_offload",
}
"""Keys that the run does not read, by the test that shows what they do."""


@pytest.fixture
def readers(whole_run: Path, reads: Path) -> dict[str, set[str]]:
    """The modules that read a key, over all processes of the run."""
    assert whole_run.is_dir()
    found: dict[str, set[str]] = {}
    for line in (line for file in reads.iterdir() for line in file.read_text().splitlines()):
        key, reader = line.split()
        found.setdefault(key, set()).add(reader)
    return found


def test_every_key_is_read_where_it_acts(readers: dict[str, set[str]]) -> None:
    known = set(fields_of(RunConfig))
    elsewhere = {key for keys in SHOWN_ELSEWHERE.values() for key in keys.split()}
    assert readers.keys() <= known
    assert SAYS_WHAT_HAPPENS_ANYWAY | elsewhere <= known
    assert known - readers.keys() - SAYS_WHAT_HAPPENS_ANYWAY - elsewhere == set()


@pytest.mark.parametrize(
    ("key", "reader"),
    [
        ("critic.optim.lr", "verl_rc.runtime.workers.sharded_model"),
        ("actor_rollout_ref.ref.fsdp_config.dtype", "verl_rc.runtime.workers.sharded_model"),
        ("algorithm.rollout_correction.rollout_rs", "verl_rc.correction.batch"),
        ("reward.custom_reward_function.path", "verl_rc.algorithm.rewards.dispatch"),
        ("actor_rollout_ref.rollout.temperature", "verl_rc.runtime.rollout.sampling"),
        ("trainer.test_freq", "verl_rc.trainer.train"),
    ],
)
def test_reads_of_every_kind_of_process_are_seen(readers: dict[str, set[str]], key: str, reader: str) -> None:
    assert reader in readers[key]
