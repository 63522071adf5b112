#!/usr/bin/env bash
# MATH with Qwen2.5-7B under several rules of rejection at once: a token must pass the token rule, and its row the row rule.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: two policies and PPO clip on current/rollout (bypass mode); tokens with a ratio outside 0.6 to 1.6 and rows that
# hold a token with (log ratio)^2 / 2 above 2.5 leave the loss. Rules, bounds and learning rate of verl's example with
# several rules (run_qwen2_5_7b_fsdp_multi_rs.sh), which executes the band on rollout/train; for 0.6 to 1.6 that is nearly
# the same.
# Expect: rollout_corr/rollout_rs_token_k1_masked_fraction and rollout_corr/rollout_rs_seq_max_k2_masked_fraction to
# say which rule rejects what, and rollout_corr/rollout_rs_masked_fraction below 0.05. Never run here.
set -euo pipefail

export CORRECTION=${CORRECTION:-bypass_ppo_clip} RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_multi_rs}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k2 \
    algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6,2.5 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    trainer.experiment_name="qwen2.5_7b_multi_rs_seed${SEED:-1}" \
    "$@"
