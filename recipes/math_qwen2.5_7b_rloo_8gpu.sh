#!/usr/bin/env bash
# MATH with Qwen2.5-7B by RLOO: the baseline of a sample is the mean score of the prompt's other samples; no spread divides
# it.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: arXiv:2402.14740, one update per step on fresh samples with sequence weights, KL to the start in the reward as
# there.
# Expect: a noisier gradient than GRPO on prompts that are nearly solved, where GRPO divides by a small spread. Never run
# here.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_seq_is} RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_rloo}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    algorithm.adv_estimator=rloo \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.experiment_name="qwen2.5_7b_rloo_seed${SEED:-1}" \
    "$@"
