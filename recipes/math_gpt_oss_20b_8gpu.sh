#!/usr/bin/env bash
# MATH with gpt-oss-20b in bfloat16 on one node of 8 GPUs: 32 experts in each layer, attention with sinks, and a window of 128
# tokens in every other layer.
#
# Hardware: 8 GPUs of 80 GB with bf16 (trainer and engines share them), 384 GiB of memory (weights and moments of the actor
# wait there: some 240 GiB). Estimated: 55 GiB a GPU in an update, 63 GiB while engines sample. Never run here. A small model
# of the family was trained on a CPU.
# Method: token weights correct what other experts in the actor than in the engine leave, too: they are not replayed. Data and
# batch sizes: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Expect: larger gaps than of dense models, because a token near the border of two experts may take the other one.
set -euo pipefail

export MODEL=${MODEL:-gpt_oss_20b} RUN_DIR=${RUN_DIR:-runs/math_gpt_oss_20b}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    trainer.experiment_name="gpt_oss_20b_seed${SEED:-1}" \
    "$@"
