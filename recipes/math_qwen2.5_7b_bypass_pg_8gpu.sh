#!/usr/bin/env bash
# MATH with Qwen2.5-7B and two policies: RLOO advantages, the policy gradient with normalised sequence weights in the actor,
# and no forward pass for old log-probs.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: REINFORCE on current/rollout (preset bypass_pg_is) with weights divided by their mean, as verl's example for
# rollout correction with RLOO (run_qwen2_5_7b_fsdp.sh), at its learning rate. Nothing clips here: the weights are all that
# holds the policy.
# Expect: a step about a tenth shorter than with three policies; rollout_corr/kl that grows within a step, because the
# current policy moves from update to update; rollout_corr/rollout_is_eff_sample_size above 0.5, else fewer updates per
# step. Never run here.
set -euo pipefail

export CORRECTION=${CORRECTION:-bypass_pg_is} RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_bypass_pg}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    algorithm.adv_estimator=rloo \
    algorithm.rollout_correction.rollout_is_batch_normalize=True \
    actor_rollout_ref.actor.optim.lr=5e-7 \
    trainer.experiment_name="qwen2.5_7b_bypass_pg_seed${SEED:-1}" \
    "$@"
