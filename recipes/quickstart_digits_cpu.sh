#!/usr/bin/env bash
# Sorting ten digits with a 1.3 M-parameter model on two CPU cores: GRPO with sequence-level rollout correction.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes.
# The engine samples in bf16 with fp8 weights, the trainer computes in fp32: the gap that rollout_corr/* shows is real.
# Expect greedy validation accuracy to rise by 30 points or more from where SFT stopped.
# scripts/quickstart.sh makes the model and the data and then calls this recipe; further arguments are passed on.
# It starts anew every time; trainer.resume_mode=auto trainer.total_training_steps=120 goes on from its last checkpoint.
set -euo pipefail

model_path=${MODEL_PATH:-${RUN_ROOT:-runs/quickstart}/sft_model}
data_dir=${DATA_DIR:-${RUN_ROOT:-runs/quickstart}/data}
run_dir=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl}
seed=${SEED:-1}
quantization=fp8_per_channel # of the engine's weights
if [[ "${HARDWARE:-cpu}" != cpu ]]; then quantization=null; fi

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    task=digits hardware="${HARDWARE:-cpu}" correction="${CORRECTION:-decoupled_seq_is}" \
    actor_rollout_ref.model.path="$model_path" \
    data.train_files="$data_dir/train.parquet" \
    data.val_files="$data_dir/val.parquet" \
    actor_rollout_ref.rollout.quantization="$quantization" \
    trainer.resume_mode=disable \
    trainer.seed="$seed" \
    trainer.experiment_name="digits_seed$seed" \
    trainer.default_local_dir="$run_dir" \
    "$@"
