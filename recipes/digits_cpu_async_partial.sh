#!/usr/bin/env bash
# The quickstart's task with weights that change under running responses: sampled on one core while another one trains.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes. RECIPE=recipes/digits_cpu_async_partial.sh bash
# scripts/quickstart.sh makes model and data first. A batch may be sampled while the one before it is trained on, and what still
# runs when new weights come goes on with them: fully_async/partial/partial_ratio is the share of such responses, and every token
# knows the version that sampled it.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_token_is} RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_async_partial}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    async=partial actor_rollout_ref.rollout.max_num_seqs=32 \
    trainer.experiment_name=digits_async_partial \
    "$@"
