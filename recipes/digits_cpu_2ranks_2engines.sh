#!/usr/bin/env bash
# The quickstart's task on two trainer ranks (FSDP2 over gloo) and two engines that share the prompts.
#
# Hardware: 2 cores, 7 GiB of memory, no GPU; about four minutes. RECIPE=recipes/digits_cpu_2ranks_2engines.sh bash
# scripts/quickstart.sh makes model and data first. Expect greedy validation accuracy to rise by 15 points or more.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_2ranks_2engines}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    trainer.n_gpus_per_node=2 \
    actor_rollout_ref.rollout.n_gpus_per_node=2 \
    trainer.experiment_name=digits_2ranks_2engines \
    "$@"
