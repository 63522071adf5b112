#!/usr/bin/env bash
# The sums of digits_cpu_tools.sh, sampled beside training: no sample waits for another's calculator, and none for the trainer.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU. What comes before it: see recipes/digits_cpu_tools.sh, which this calls. Weights change
# under running conversations; the tokens of tools have no version, those of the policy the one that sampled them.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_token_is} RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/tools}/rl_async}

exec bash "$(dirname "${BASH_SOURCE[0]}")/digits_cpu_tools.sh" \
    async=partial \
    trainer.experiment_name=sums_async \
    "$@"
