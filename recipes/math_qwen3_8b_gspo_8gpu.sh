#!/usr/bin/env bash
# MATH with Qwen3-8B-Base by GSPO: one ratio for a whole row, the geometric mean of its tokens', clipped in a narrow range.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls; the model is 8 % larger.
# Method: arXiv:2507.18071, with its clip range of 3e-4 below and 4e-4 above, rows averaged each over its own tokens.
# Sequence weights correct between engine and trainer at the same level.
# Expect: actor/pg_clipfrac far above that of PPO clip (the paper reports some 15 %), because a whole row is clipped at
# once; that is no fault. Never run here.
set -euo pipefail

export MODEL=${MODEL:-qwen3_8b} CORRECTION=${CORRECTION:-decoupled_seq_is} RUN_DIR=${RUN_DIR:-runs/math_qwen3_8b_gspo}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    trainer.experiment_name="qwen3_8b_gspo_seed${SEED:-1}" \
    "$@"
