#!/usr/bin/env bash
# The quickstart's task by DAPO: dynamic sampling, clip-higher, token-mean, a penalty on overlong answers.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about ten minutes. RECIPE=recipes/digits_cpu_dapo.sh bash scripts/quickstart.sh
# makes model and data first. Every step draws prompts until 32 of them have both right and wrong samples, so critic/score/mean
# is that of a choice of prompts; training/filter_groups/sampled_score_mean is that of all.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_dapo}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.gen_batch_size=32 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward.reward_kwargs.overlong_buffer_cfg.enable=True \
    reward.reward_kwargs.overlong_buffer_cfg.len=1 \
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.total_training_steps=60 \
    trainer.save_freq=60 \
    trainer.experiment_name=digits_dapo \
    "$@"
