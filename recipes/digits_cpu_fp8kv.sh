#!/usr/bin/env bash
# The quickstart's task under a strong mismatch: the engine keeps its key-value cache in fp8, so that single ratios reach 10 and
# more. Token weights hold what sequence weights could not.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes. NUM_HEADS=6 RECIPE=recipes/digits_cpu_fp8kv.sh bash
# scripts/quickstart.sh makes model and data first: vLLM's fp8 cache on a CPU wants heads of a multiple of 32.
# Expect greedy validation accuracy to rise by 15 points or more.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_token_is} RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_fp8kv}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    algorithm.rollout_correction.diagnostics=full \
    actor_rollout_ref.rollout.quantization=null \
    actor_rollout_ref.rollout.kv_cache_dtype=fp8 \
    trainer.experiment_name=digits_fp8kv \
    "$@"
