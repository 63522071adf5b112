#!/usr/bin/env bash
# MATH with Qwen3-8B-Base by CISPO: the ratio is clipped and made a constant, so that a token outside the range keeps its
# gradient.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls; the model is 8 % larger.
# Method: MiniMax-M1, arXiv:2506.13585: no bound below (clip_ratio_low=1 allows ratios down to 0), a wide one above.
# Expect: actor/pg_clipfrac near 0, and responses that grow longer than under PPO clip, because rare words of reflection are
# not clipped away. Never run here.
set -euo pipefail

export MODEL=${MODEL:-qwen3_8b} RUN_DIR=${RUN_DIR:-runs/math_qwen3_8b_cispo}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    actor_rollout_ref.actor.policy_loss.loss_mode=cispo \
    actor_rollout_ref.actor.clip_ratio_low=1 \
    actor_rollout_ref.actor.clip_ratio_high=5 \
    trainer.experiment_name="qwen3_8b_cispo_seed${SEED:-1}" \
    "$@"
