#!/usr/bin/env bash
# Makes what a run on digits starts from: the task, a tiny model, and that model after SFT. Nothing is installed.
# Usage: [PYTHON=…] [SEED=1] [RUN_ROOT=runs/quickstart] [NUM_HEADS=4] bash scripts/warm_start.sh
# Data lie in RUN_ROOT/data afterwards, models in RUN_ROOT/base_model and RUN_ROOT/sft_model (or DATA_DIR and MODEL_PATH).
# DIGITS_OPTIONS="--length 48" makes another task, see scripts/prepare_data/digits.py; TASK=squares is one with pictures, see
# scripts/prepare_data/squares.py; MODEL_OPTIONS="--experts 8" makes another model, see scripts/make_tiny_model.py; SFT_OPTIONS
# are overrides of SFT.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
seed=${SEED:-1}
out=${RUN_ROOT:-runs/quickstart}
data=${DATA_DIR:-$out/data}
model=${MODEL_PATH:-$out/sft_model}

echo "${TASK_STEP:-}making the task (${TASK:-digits}) and a tiny model"
"$python" "scripts/prepare_data/${TASK:-digits}.py" --output_dir "$data" --seed "$seed" ${DIGITS_OPTIONS:-}
"$python" scripts/make_tiny_model.py --output_dir "$out/base_model" --seed "$seed" --num_heads "${NUM_HEADS:-4}" \
    ${MODEL_OPTIONS:-}

echo "${SFT_STEP:-}warm start with SFT"
"$python" -m verl_rc.main_sft model.path="$out/base_model" data.train_files="$data/sft_train.parquet" \
    data.val_files="$data/sft_val.parquet" trainer.output_dir="$model" trainer.seed="$seed" trainer.stop_at_accuracy=0.25 \
    ${SFT_OPTIONS:-}
