#!/usr/bin/env bash
# From nothing to a trained model on a CPU: install, make a tiny model and a task, warm-start with SFT, train with RL.
# Usage: bash scripts/quickstart.sh [override ...]      (overrides go to the RL run; SEED=2 chooses another seed,
# RECIPE=recipes/digits_cpu_gae.sh another way of training, NUM_HEADS=6 a model with heads of 32 instead of 48)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
seed=${SEED:-1}
out=${RUN_ROOT:-runs/quickstart}
export SEED=$seed RUN_ROOT=$out MODEL_PATH="$out/sft_model" DATA_DIR="$out/data" PYTHON="$root/.venv/bin/python"

mkdir -p "$out" # a checkout that cannot be written to is found before anything is installed

echo "[1/4] installing into .venv (skipped when current)"
bash scripts/install.sh cpu

echo "[2/4] making the task (sorting digits) and a tiny model"
"$PYTHON" scripts/prepare_data/digits.py --output_dir "$DATA_DIR" --seed "$seed"
"$PYTHON" scripts/make_tiny_model.py --output_dir "$out/base_model" --seed "$seed" --num_heads "${NUM_HEADS:-4}"

echo "[3/4] warm start with SFT"
"$PYTHON" -m verl_rc.main_sft model.path="$out/base_model" data.train_files="$DATA_DIR/sft_train.parquet" \
    data.val_files="$DATA_DIR/sft_val.parquet" trainer.output_dir="$MODEL_PATH" trainer.seed="$seed" trainer.stop_at_accuracy=0.2

echo "[4/4] training with rollout correction"
bash "${RECIPE:-recipes/quickstart_digits_cpu.sh}" "$@"
