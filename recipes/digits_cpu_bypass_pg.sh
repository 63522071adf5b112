#!/usr/bin/env bash
# The quickstart's task in bypass mode: two policies, the policy gradient weighted in the actor by current over rollout policy,
# and no forward pass for old log-probs.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes. RECIPE=recipes/digits_cpu_bypass_pg.sh bash
# scripts/quickstart.sh makes model and data first. Expect greedy validation accuracy to rise by 15 points or more.
set -euo pipefail

export CORRECTION=${CORRECTION:-bypass_pg_is} RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_bypass_pg}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    trainer.experiment_name=digits_bypass_pg \
    "$@"
