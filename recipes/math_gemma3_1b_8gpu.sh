#!/usr/bin/env bash
# MATH with Gemma 3 1B on one node of 8 GPUs: five of six layers look back 512 tokens, the others at everything.
#
# Hardware: 8 GPUs of 80 GB with bf16 (trainer and engines share them), 64 GiB of memory. Estimated: 13 GiB a GPU in an
# update, 51 GiB while engines sample. Never run here. A small model of the family was trained on a CPU.
# Method: GRPO with token weights. Data and batch sizes: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Expect: rollout_corr/kl in the thousandths of a nat. A vocabulary of 262,144 tokens makes logits the largest part of an
# update.
set -euo pipefail

export MODEL=${MODEL:-gemma3_1b} RUN_DIR=${RUN_DIR:-runs/math_gemma3_1b}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    trainer.experiment_name="gemma3_1b_seed${SEED:-1}" \
    "$@"
