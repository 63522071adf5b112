#!/usr/bin/env bash
# The quickstart's task one step off: a batch is sampled on one core while the one before it is trained on another.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes. RECIPE=recipes/digits_cpu_one_step_off.sh bash
# scripts/quickstart.sh makes model and data first. Tokens are one step old from the second step on (async/token_age/mean), which
# the correction sees. Measured: steps take 1.6 s, in turns 2.4 s; greedy validation accuracy rises as the quickstart's does, by 45
# points in 40 steps. trainer/idle_ratio says how long training waited for samples.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_token_is} RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_one_step_off}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    async=one_step_off \
    trainer.experiment_name=digits_one_step_off \
    "$@"
