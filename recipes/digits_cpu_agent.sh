#!/usr/bin/env bash
# Guessing a secret digit by an agent from outside: a program with a loop of its own that asks the policy by the client of
# openai and scores its game at the end. GRPO over whole episodes.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU. What comes before it is as in recipes/digits_cpu_environment.sh, which this
# calls. PROCESS=1 starts a process for each episode, which costs it the start of Python: too much for two cores with all
# rows of the validation file at once, so pass data.val_max_samples=8 and smaller batches with it.
# Further arguments are passed on.
set -euo pipefail

export RUN_DIR=${RUN_DIR:-${RUN_ROOT:-runs/guess}/rl_agent}
agent=recipes.environments.guess_agent
started_by="function:$agent:play"
if [[ ${PROCESS:-0} == 1 ]]; then started_by="command:[${PYTHON:-python},-m,$agent]"; fi

ENVIRONMENT=verl_rc.runtime.rollout.environments.agent:Agent exec bash "$(dirname "${BASH_SOURCE[0]}")/digits_cpu_environment.sh" \
    "+actor_rollout_ref.rollout.environment.arguments.${started_by%%:*}=${started_by#*:}" \
    trainer.experiment_name="guess_agent_seed${SEED:-1}" \
    "$@"
