#!/usr/bin/env bash
# The quickstart's task in exact mode: engine and trainer compute the same bits, and every step demands it (docs/exact.md).
#
# Hardware: 2 cores, 5 GiB of memory, no GPU. RECIPE=recipes/digits_cpu_exact.sh bash scripts/quickstart.sh makes model and data
# first. DTYPE=bfloat16 for the other precision. Expect rollout_corr/kl and sync/rollout_gap_max to be 0 in every step.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_exact}
dtype=${DTYPE:-float32}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    actor_rollout_ref.exact=True \
    actor_rollout_ref.rollout.quantization=null \
    actor_rollout_ref.rollout.dtype="$dtype" \
    actor_rollout_ref.actor.fsdp_config.dtype="$dtype" \
    trainer.experiment_name="digits_exact_$dtype" \
    "$@"
