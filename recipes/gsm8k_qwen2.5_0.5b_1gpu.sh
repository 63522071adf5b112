#!/usr/bin/env bash
# GSM8K with Qwen2.5-0.5B-Instruct on one GPU: GRPO with sequence-level rollout correction.
#
# Hardware: one GPU of 40 GB with bf16 (trainer and engine share it), 16 GiB of memory, 4 cores. Estimated: 14 GiB a GPU in an
# update, 24 GiB while engines sample. With 24 GB pass
# actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.rollout.gpu_memory_utilization=0.35.
# Data: python scripts/prepare_data/gsm8k.py --output_dir data/gsm8k   (7,473 problems to train on, 1,319 to test)
# One epoch is 29 steps; a checkpoint every 20 steps, the whole test split every 10. Further arguments are passed on.
set -euo pipefail

seed=${SEED:-1}

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    task=gsm8k model="${MODEL:-qwen2.5_0.5b}" hardware=1gpu correction="${CORRECTION:-decoupled_seq_is}" \
    ${MODEL_PATH:+"actor_rollout_ref.model.path=$MODEL_PATH"} \
    ${DATA_DIR:+"data.train_files=$DATA_DIR/train.parquet" "data.val_files=$DATA_DIR/test.parquet"} \
    trainer.seed="$seed" \
    trainer.experiment_name="qwen2.5_0.5b_grpo_seq_is_seed$seed" \
    trainer.default_local_dir="${RUN_DIR:-runs/gsm8k_qwen2.5_0.5b}" \
    "$@"
