#!/usr/bin/env bash
# The quickstart's task with LoRA adapters in every linear layer: a third of the weights train, engines receive them merged, and
# the reference policy of the KL term is the actor without its adapters.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU; about four minutes. RECIPE=recipes/digits_cpu_lora.sh bash
# scripts/quickstart.sh makes model and data first. Expect greedy validation accuracy to rise by 15 points or more.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/quickstart}/rl_lora}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.experiment_name=digits_lora \
    "$@"
