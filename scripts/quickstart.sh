#!/usr/bin/env bash
# From nothing to a trained model: install, make a tiny model and a task, warm-start with SFT, train with RL.
# Usage: bash scripts/quickstart.sh [override ...]      (overrides go to the RL run; SEED=2 chooses another seed,
# RECIPE=recipes/digits_cpu_gae.sh another way of training, NUM_HEADS=6 a model with heads of 32 instead of 48)
# HARDWARE=1gpu does the same on one NVIDIA GPU: the GPU build is installed, heads have 32, the engine computes in bf16.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
out=${RUN_ROOT:-runs/quickstart}
export SEED=${SEED:-1} RUN_ROOT=$out MODEL_PATH="$out/sft_model" DATA_DIR="$out/data" PYTHON="$root/.venv/bin/python"

export HARDWARE=${HARDWARE:-cpu}
case "$HARDWARE" in
  cpu) build=cpu ;;
  1gpu)
    build=gpu
    export NUM_HEADS=${NUM_HEADS:-6}
    if [[ -z "$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)" ]]; then
      echo "quickstart: HARDWARE=1gpu needs an NVIDIA GPU, and nvidia-smi shows none; nothing was downloaded. Drop HARDWARE to train on the CPU." >&2
      exit 2
    fi ;;
  *)
    echo "quickstart: HARDWARE must be cpu or 1gpu, got $HARDWARE." >&2
    exit 2 ;;
esac

mkdir -p "$out" # a checkout that cannot be written to is found before anything is installed

echo "[1/4] installing into .venv (skipped when current)"
bash scripts/install.sh "$build"

TASK_STEP="[2/4] " SFT_STEP="[3/4] " bash scripts/warm_start.sh

echo "[4/4] training with rollout correction"
bash "${RECIPE:-recipes/quickstart_digits_cpu.sh}" "$@"
