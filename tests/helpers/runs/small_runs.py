"""Model, data and overrides of a complete, very small run; shared by the integration and chaos tests."""

import os
import subprocess
import sys
from pathlib import Path

import make_tiny_model

ROOT = Path(__file__).parents[3]
HELPERS = os.pathsep.join(str(folder) for folder in sorted((ROOT / "tests" / "helpers").iterdir()))
"""``PYTHONPATH`` of processes that import these modules."""

SHARE_OF_DIGITS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(a == b for a, b in zip(solution_str, str(ground_truth))) / 10
    return {"score": digits + len(solution_str) / 100, "acc": digits}
"""
"""A reward function under which samples of a random model differ."""


def share_of_digits(folder: Path) -> str:
    """The override that names this reward function, which is written into a folder."""
    (folder / "reward.py").write_text(SHARE_OF_DIGITS)
    return f"reward.custom_reward_function.path={folder / 'reward.py'}"


WITH_EVERYTHING = [
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "critic.fsdp_config.dtype=float32",
    "trainer.critic_warmup=2",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=100",
    "distillation.enabled=True",
    "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.use_policy_gradient=True",
    "distillation.distillation_loss.distillation_loss_coef=0.1",
    "actor_rollout_ref.rollout.sync_proof.canary_freq=0",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "actor_rollout_ref.actor.checkpoint.async_save=True",
]
"""Further overrides of a run whose next step depends on as much as possible: critic, reference, teacher,
schedules, adaptive KL."""


def make_task(folder: Path, *model_options: str) -> dict[str, Path]:
    """``model`` and ``data`` folders made by the scripts a user would call."""
    sizes = ["--hidden_size", "64", "--intermediate_size", "96", "--num_layers", "2"]
    heads = ["--num_heads", "2", "--num_kv_heads", "1"]
    make_tiny_model.main(["--output_dir", str(folder / "model"), *sizes, *heads, *model_options])
    data = [
        "scripts/prepare_data/digits.py",
        "--output_dir",
        str(folder / "data"),
        "--num_train",
        "64",
        "--num_val",
        "8",
    ]
    command = [sys.executable, *data, "--num_sft", "64", "--num_sft_val", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {"model": folder / "model", "data": folder / "data"}


def make_game(folder: Path) -> dict[str, Path]:
    """The same for episodes: a model that has learnt to end its turns, and the rows of the guessing game."""
    task = make_task(folder)
    game = [sys.executable, "scripts/prepare_data/guess.py", "--output_dir", str(folder / "game")]
    sizes = ["--num_train", "64", "--num_val", "8", "--num_sft", "512", "--num_sft_val", "8"]
    sft = [
        *(sys.executable, "-m", "verl_rc.main_sft"),
        f"model.path={task['model']}",
        f"data.train_files={folder / 'game' / 'sft_train.parquet'}",
        f"data.val_files={folder / 'game' / 'sft_val.parquet'}",
        f"trainer.output_dir={folder / 'player'}",
        "trainer.total_training_steps=40",
        "optim.lr=5e-3",
    ]
    for command in ([*game, *sizes], sft):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {"model": folder / "player", "data": folder / "game"}


def run_overrides(task: dict[str, Path], run_folder: Path) -> list[str]:
    """Overrides of a complete, very small run with an engine in fp32."""
    return [
        f"data.train_files={task['data'] / 'train.parquet'}",
        f"data.val_files={task['data'] / 'val.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=20",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={task['model']}",
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
        "actor_rollout_ref.rollout.sync_proof.canary_num_prompts=4",  # fewer rows than faulty_workers.BAD_ROW
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.preset=decoupled_seq_is_rs",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.log_val_generations=2",
        "trainer.logger=['console']",
        "trainer.report=never",
        f"trainer.default_local_dir={run_folder}",
        f"trainer.rollout_data_dir={run_folder / 'rollouts'}",
    ]
