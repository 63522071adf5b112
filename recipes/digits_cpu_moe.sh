#!/usr/bin/env bash
# The quickstart's task by a model with eight experts in each layer, of which a token takes two, the same ones in the actor as
# in the engine (router replay). The engine samples in bf16: vLLM has no quantised kernel for experts on a CPU.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU. Model, data and this recipe:
#   RUN_ROOT=runs/moe MODEL_OPTIONS="--experts 8 --hidden_size 128 --intermediate_size 128" \
#       RECIPE=recipes/digits_cpu_moe.sh bash scripts/quickstart.sh
# Further arguments are passed on.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_moe}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    actor_rollout_ref.rollout.quantization=null \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
    trainer.experiment_name="digits_moe_seed${SEED:-1}" \
    "$@"
