#!/usr/bin/env bash
# Guessing a secret digit by its hints with a 1.3 M-parameter model on two CPU cores: episodes of up to four turns with an
# environment that has a state (the secret) and rewards every turn. GRPO over whole episodes.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU. All that is not named here is as in recipes/quickstart_digits_cpu.sh, which
# this calls. The model is warmed up on games of a player who uses half of the hints: .55 of the secrets are found so, all
# of them by halving.
# Before it (scripts/install.sh cpu comes first; PATH holds .venv/bin):
#   python scripts/prepare_data/guess.py --output_dir runs/guess/data
#   python scripts/make_tiny_model.py --output_dir runs/guess/base_model
#   python -m verl_rc.main_sft model.path=runs/guess/base_model data.train_files=runs/guess/data/sft_train.parquet \
#       data.val_files=runs/guess/data/sft_val.parquet trainer.output_dir=runs/guess/sft_model trainer.total_training_steps=120
# Further arguments are passed on; ENVIRONMENT=module:Class names an environment of your own.
set -euo pipefail

root=${RUN_ROOT:-runs/guess}
export MODEL_PATH=${MODEL_PATH:-$root/sft_model} DATA_DIR=${DATA_DIR:-$root/data} RUN_DIR=${RUN_DIR:-$root/rl}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    data.max_prompt_length=8 \
    data.max_response_length=24 \
    actor_rollout_ref.rollout.environment.name="${ENVIRONMENT:-recipes.environments.guess:GuessNumber}" \
    actor_rollout_ref.rollout.environment.max_turns=4 \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    trainer.total_training_steps=200 \
    trainer.save_freq=200 \
    trainer.project_name=verl_rc_environment \
    trainer.experiment_name="guess_seed${SEED:-1}" \
    "$@"
