#!/usr/bin/env bash
# MATH with Qwen2.5-7B on one node of 8 GPUs: GRPO with token-level truncated importance sampling. The recipes named math_*
# change one thing about this one each.
#
# Hardware: 8 GPUs of 80 GB with bf16 (trainer and engines share them), 128 GiB of memory. Estimated: 55 GiB a GPU in an
# update, 28 of them whole gradients, 63 GiB while engines sample. Never run here. With 40 GB a GPU pass
# actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 actor_rollout_ref.rollout.gpu_memory_utilization=0.5.
# Method: GRPO (arXiv:2402.03300); weights min(train/rollout, 2) of every token, which Yao et al. 2025 introduced as
# truncated importance sampling. Batch sizes are those of verl's 7B examples of rollout correction.
# Data: python scripts/prepare_data/math_dataset.py --output_dir data/math   (7,500 problems to train on, 5,000 to test)
# Expect: rollout_corr/kl in the thousandths of a nat and weights at the cap in less than 1 % of tokens (a bf16 engine and a
# bf16 trainer disagree little), and accuracy on the test split that rises for the first hundred steps. One epoch is 58
# steps.
set -euo pipefail

seed=${SEED:-1}

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    task=math model="${MODEL:-qwen2.5_7b}" hardware=8gpu correction="${CORRECTION:-decoupled_token_is}" \
    algorithm.rollout_correction.diagnostics=full \
    ${MODEL_PATH:+"actor_rollout_ref.model.path=$MODEL_PATH"} \
    ${DATA_DIR:+"data.train_files=$DATA_DIR/train.parquet" "data.val_files=$DATA_DIR/test.parquet"} \
    trainer.log_val_generations=8 \
    trainer.seed="$seed" \
    trainer.experiment_name="qwen2.5_7b_token_is_seed$seed" \
    trainer.default_local_dir="${RUN_DIR:-runs/math_qwen2.5_7b_token_is}" \
    "$@"
