#!/usr/bin/env bash
# Sorting ten digits with a 1.3 M-parameter model on two CPU cores: GRPO with sequence-level rollout correction.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes.
# The engine samples in bf16 with fp8 weights, the trainer computes in fp32: the gap that rollout_corr/* shows is real.
# Expect greedy validation accuracy to rise by 30 points or more from where SFT stopped.
# scripts/quickstart.sh makes the model and the data and then calls this recipe; further arguments are passed on.
# It starts anew every time; trainer.resume_mode=auto trainer.total_training_steps=150 goes on from its last checkpoint.
set -euo pipefail

model_path=${MODEL_PATH:-${RUN_ROOT:-runs/quickstart}/sft_model}
data_dir=${DATA_DIR:-${RUN_ROOT:-runs/quickstart}/data}
run_dir=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl}
seed=${SEED:-1}

prompts_per_step=32
samples_per_prompt=8
prompts_per_update=16
training_steps=120

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.preset=decoupled_seq_is \
    data.train_files="$data_dir/train.parquet" \
    data.val_files="$data_dir/val.parquet" \
    data.train_batch_size=$prompts_per_step \
    data.max_prompt_length=20 \
    data.max_response_length=12 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$model_path" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=$prompts_per_update \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.actor.fsdp_config.dtype=float32 \
    actor_rollout_ref.actor.optim.lr=5e-5 \
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]" \
    actor_rollout_ref.actor.optim.weight_decay=0 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$samples_per_prompt \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.quantization=fp8_per_channel \
    actor_rollout_ref.rollout.kv_cache_megabytes=64 \
    actor_rollout_ref.rollout.max_num_seqs=256 \
    trainer.device=cpu \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    trainer.total_training_steps=$training_steps \
    trainer.val_before_train=True \
    trainer.test_freq=20 \
    trainer.save_freq=$training_steps \
    trainer.resume_mode=disable \
    trainer.log_val_generations=8 \
    trainer.seed="$seed" \
    trainer.project_name=verl_rc_quickstart \
    trainer.experiment_name="digits_seed$seed" \
    trainer.default_local_dir="$run_dir" \
    "trainer.logger=['console','wandb']" \
    "$@"
