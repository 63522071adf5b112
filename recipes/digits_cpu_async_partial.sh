#!/usr/bin/env bash
# The quickstart's task with weights that change under running responses: sampled on one core while another one trains.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about six minutes. RECIPE=recipes/digits_cpu_async_partial.sh bash
# scripts/quickstart.sh makes model and data first. The engine gets 32 places, so that it takes about as long as the trainer and
# something runs when new weights come. fully_async/partial/partial_ratio is the share of responses that go on with them, and
# every token knows the version that sampled it. Measured in 24 steps on a machine with a load of 12: accuracy .25 to .68, 7 % of
# the responses of two versions, tokens .7 steps old, steps of 4.5 s, publications .17 s of them (upper bounds).
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_token_is} RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_async_partial}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    async=partial actor_rollout_ref.rollout.max_num_seqs=32 \
    trainer.experiment_name=digits_async_partial \
    "$@"
