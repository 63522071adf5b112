#!/usr/bin/env bash
# MATH with Qwen2.5-7B on two nodes of 8 GPUs, one for the trainer, one for engines: a batch is sampled while the one before
# it is trained on. Prompts, method and correction are those of recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
#
# Hardware: 2 nodes of 8 GPUs of 80 GB with bf16, and a Ray cluster first: docs/cluster.md. Estimated: 52 GiB a GPU
# in an update, 68 GiB while engines sample. Never run here. On one node of 8, four for each, without a cluster: pass
# ray_kwargs.ray_init.address=null trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.n_gpus_per_node=4.
# Method: one step off. A response has one version of the weights and is 0 or 1 step old when it is trained on, never older;
# at most 256 prompts of 8 samples are sampled or wait. Engines finish what they have, then take the weights: a step takes as
# long as the slower of sampling and training. Measure both in turns (timing_s/gen and the rest of a synchronous step), and
# verl-rc explain THIS --sampling-seconds=S --training-seconds=T says what a step takes and whether a larger bound helps.
# Expect: rollout_corr/kl above that of the synchronous run, by the update between sampling and training, and
# trainer/idle_ratio near 0 where sampling is not the slower side; otherwise give engines the larger share of the nodes.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_async}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    async="${ASYNC:-one_step_off}" \
    ray_kwargs.ray_init.address=auto \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.n_gpus_per_node=8 \
    trainer.experiment_name="qwen2.5_7b_async_seed${SEED:-1}" \
    "$@"
