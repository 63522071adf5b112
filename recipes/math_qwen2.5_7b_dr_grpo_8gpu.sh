#!/usr/bin/env bash
# MATH with Qwen2.5-7B by Dr. GRPO: scores are centred and not divided by their spread, token losses are divided by a
# constant.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: arXiv:2503.20783: both divisions of GRPO favour some prompts and some lengths. The constant is
# data.max_response_length.
# Expect: wrong answers that stop growing longer (response_length/mean), accuracy as under GRPO or above. A loss that is
# smaller by the share of the limit that responses fill; Adam does not mind. Never run here.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_dr_grpo}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    algorithm.norm_adv_by_std_in_grpo=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.use_kl_loss=False \
    trainer.experiment_name="qwen2.5_7b_dr_grpo_seed${SEED:-1}" \
    "$@"
