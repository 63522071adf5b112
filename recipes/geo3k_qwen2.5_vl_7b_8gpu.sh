#!/usr/bin/env bash
# Geometry3k with Qwen2.5-VL-7B on one node of 8 GPUs: GRPO on problems with a picture each. The vision tower is not trained.
#
# Hardware: 8 GPUs of 80 GB with bf16 (trainer and engines share them), 128 GiB of memory. Estimated: 59 GiB a GPU in an
# update, 64 GiB while engines sample. Never run here.
# Method: GRPO (arXiv:2402.03300) with token-level truncated importance sampling; the reward is verl's: 0.9 for the answer, 0.1
# for the form. Batch sizes are smaller than those of verl's example (512 prompts, 5 samples each).
# Data: verl's own files, from its examples/data_preprocess/geo3k.py, in data/geo3k (2,101 problems to train on, 601 to test)
# Expect: rollout_corr/kl in the thousandths of a nat and accuracy on the test split that rises for the first hundred steps.
set -euo pipefail

seed=${SEED:-1}

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    task=geo3k hardware=8gpu correction="${CORRECTION:-decoupled_token_is}" \
    algorithm.rollout_correction.diagnostics=full \
    ${MODEL_PATH:+"actor_rollout_ref.model.path=$MODEL_PATH"} \
    ${DATA_DIR:+"data.train_files=$DATA_DIR/train.parquet" "data.val_files=$DATA_DIR/test.parquet"} \
    trainer.seed="$seed" \
    trainer.experiment_name="geo3k_qwen2.5_vl_7b_seed$seed" \
    trainer.default_local_dir="${RUN_DIR:-runs/geo3k_qwen2.5_vl_7b}" \
    "$@"
