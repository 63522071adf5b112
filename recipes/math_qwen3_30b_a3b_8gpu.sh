#!/usr/bin/env bash
# MATH with Qwen3-30B-A3B-Base, which has 128 experts in each layer, on one node of 8 GPUs: GRPO with router replay.
#
# Hardware: 8 GPUs of 80 GB with bf16 (trainer and engines share them), 512 GiB of memory (weights and moments of the actor
# wait there: some 340 GiB). Estimated: 70 GiB a GPU in an update, 66 GiB while engines sample; gradients are reduced after
# every micro-batch. Never run here.
# Method: each token takes in the actor the experts that it took in the engine (R3, arXiv:2510.11370), and token weights
# correct what is left. Data and batch sizes: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Expect: actor/flipped_experts far above the 0.02 of a model of three layers, because one of 48 layers suffices for a token to
# count, and sync/canary_own_experts_gap above sync/canary_mean_gap. Records of experts are 384 bytes a token.
set -euo pipefail

export MODEL=${MODEL:-qwen3_30b_a3b} RUN_DIR=${RUN_DIR:-runs/math_qwen3_30b_a3b}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5120 \
    trainer.experiment_name="qwen3_30b_a3b_seed${SEED:-1}" \
    "$@"
