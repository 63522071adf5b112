#!/usr/bin/env bash
# MATH with Qwen2.5-7B by REINFORCE++: returns of every token, whitened over the whole batch instead of over a prompt's
# samples.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: arXiv:2501.03262: PPO clip without a critic, a KL penalty per token in the reward (k1), advantages normalised over
# the batch. Needs no group: actor_rollout_ref.rollout.n=1 with data.train_batch_size=1024 samples as much from eight times
# as many prompts.
# Expect: slower gains than GRPO where prompts differ much in difficulty, since nothing compares a sample with its prompt.
# Never run here.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_reinforce_plus_plus}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    algorithm.adv_estimator=reinforce_plus_plus \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=k1 \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.experiment_name="qwen2.5_7b_reinforce_plus_plus_seed${SEED:-1}" \
    "$@"
