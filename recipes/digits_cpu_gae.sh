#!/usr/bin/env bash
# The quickstart's task with a critic: GAE instead of group statistics, after five steps that train the critic alone.
#
# Hardware: 2 cores, 6 GiB of memory, no GPU; about six minutes. RECIPE=recipes/digits_cpu_gae.sh bash scripts/quickstart.sh
# makes model and data first. Expect greedy validation accuracy to rise by 15 points or more.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_gae}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    algorithm.adv_estimator=gae \
    algorithm.lam=1.0 \
    critic.optim.lr=5e-4 \
    critic.optim.weight_decay=0 \
    critic.fsdp_config.dtype=float32 \
    critic.ppo_max_token_len_per_gpu=4096 \
    trainer.critic_warmup=5 \
    trainer.experiment_name=digits_gae \
    "$@"
