#!/usr/bin/env bash
# MATH with Qwen2.5-32B on 4 nodes of 8 GPUs: PPO with a critic of the same size, and token weights truncated at 10.
#
# Hardware: 4 x 8 GPUs of 80 GB with bf16 and fast links between nodes, 512 GiB of memory a node (weights and moments of
# actor and critic wait there: some 250 GiB), a file system that all nodes see. Estimated: 56 GiB a GPU in an update. A Ray
# cluster first: docs/cluster.md. Never run here.
# Method: PPO (arXiv:1707.06347) with GAE at gamma = lambda = 1, a critic that trains alone for the first 4 steps, and
# truncated importance sampling (Yao et al. 2025) with a cap of 10: wide enough to leave nearly every token unbiased, tight
# enough to stop single tokens.
# Data: python scripts/prepare_data/math_dataset.py --output_dir data/math
# Expect: critic/vf_explained_var above 0 after the warm-up and above 0.3 later, weights at the cap in one of ten thousand
# tokens. One epoch is 14 steps.
set -euo pipefail

model_path=${MODEL_PATH:-Qwen/Qwen2.5-32B}
data_dir=${DATA_DIR:-data/math}
run_dir=${RUN_DIR:-runs/ppo_qwen2.5_32b_token_is}
seed=${SEED:-1}
nodes=${NNODES:-4}

prompts_per_step=512
samples_per_prompt=4
prompts_per_update=128
max_prompt_length=1024
max_response_length=4096
tokens_per_micro_batch=8192
epochs=10

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    algorithm.lam=1.0 \
    algorithm.rollout_correction.preset=decoupled_token_is \
    algorithm.rollout_correction.rollout_is_threshold=10.0 \
    data.train_files="$data_dir/train.parquet" \
    data.val_files="$data_dir/test.parquet" \
    data.train_batch_size=$prompts_per_step \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$model_path" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$prompts_per_update \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_micro_batch \
    actor_rollout_ref.actor.fsdp_config.dtype=bfloat16 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$samples_per_prompt \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.max_num_seqs=512 \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=$tokens_per_micro_batch \
    critic.fsdp_config.dtype=bfloat16 \
    critic.fsdp_config.param_offload=True \
    critic.fsdp_config.optimizer_offload=True \
    ray_kwargs.ray_init.address=auto \
    trainer.device=cuda \
    trainer.nnodes="$nodes" \
    trainer.n_gpus_per_node=8 \
    trainer.critic_warmup=5 \
    trainer.total_epochs=$epochs \
    trainer.val_before_train=True \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.ready_timeout_seconds=1200 \
    trainer.seed="$seed" \
    trainer.project_name=verl_rc_math \
    trainer.experiment_name="ppo_qwen2.5_32b_token_is_seed$seed" \
    trainer.default_local_dir="$run_dir" \
    "trainer.logger=['console','wandb']" \
    "$@"
