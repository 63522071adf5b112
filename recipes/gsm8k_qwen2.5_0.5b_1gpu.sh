#!/usr/bin/env bash
# GSM8K with Qwen2.5-0.5B-Instruct on one GPU: GRPO with sequence-level rollout correction.
#
# Hardware: one GPU with bf16 and 40 GiB (trainer and engine share it; an estimate: fp32 master weights and Adam 8 GiB, logits
# and their gradient 10 GiB, engine 16 GiB), 16 GiB of memory, 4 cores. With 24 GiB of GPU memory pass
# actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.rollout.gpu_memory_utilization=0.35.
# Data: python scripts/prepare_data/gsm8k.py --output_dir data/gsm8k   (7,473 problems to train on, 1,319 to test)
# One epoch is 29 steps; a checkpoint every 20 steps, the whole test split every 10. Further arguments are passed on.
set -euo pipefail

model_path=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
data_dir=${DATA_DIR:-data/gsm8k}
run_dir=${RUN_DIR:-runs/gsm8k_qwen2.5_0.5b}
seed=${SEED:-1}

prompts_per_step=256
samples_per_prompt=8
prompts_per_update=64
tokens_per_micro_batch=16384
epochs=10

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.preset=decoupled_seq_is \
    data.train_files="$data_dir/train.parquet" \
    data.val_files="$data_dir/test.parquet" \
    data.train_batch_size=$prompts_per_step \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$model_path" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$prompts_per_update \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_micro_batch \
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 \
    actor_rollout_ref.actor.fsdp_config.dtype=bfloat16 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$samples_per_prompt \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    trainer.device=cuda \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=$epochs \
    trainer.val_before_train=True \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    trainer.log_val_generations=8 \
    trainer.seed="$seed" \
    trainer.project_name=verl_rc_gsm8k \
    trainer.experiment_name="qwen2.5_0.5b_grpo_seq_is_seed$seed" \
    trainer.default_local_dir="$run_dir" \
    "trainer.logger=['console','wandb']" \
    "$@"
