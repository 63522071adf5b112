"""Overrides of a complete, very small run; shared by the integration tests."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_overrides(task: dict[str, Path], run_folder: Path) -> list[str]:
    """Overrides of a complete, very small run with an engine in fp32."""
    return [
        f"data.train_files={task['data'] / 'train.parquet'}",
        f"data.val_files={task['data'] / 'val.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=20",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={task['model']}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.02",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_model_len=96",
        "actor_rollout_ref.rollout.kv_cache_megabytes=32",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
        "actor_rollout_ref.rollout.sync_proof.canary_freq=1",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.preset=decoupled_seq_is_rs",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.log_val_generations=2",
        "trainer.logger=['console']",
        f"trainer.default_local_dir={run_folder}",
        f"trainer.rollout_data_dir={run_folder / 'rollouts'}",
    ]
