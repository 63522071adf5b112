#!/usr/bin/env bash
# The quickstart's task without rewards: a teacher, a model of another shape that SFT has trained for longer, scores what the
# policy samples, and log π_teacher − log π is the advantage of a token.
#
# Hardware: 2 cores, 5 GiB of memory, no GPU. scripts/warm_start.sh makes data, student and teacher before it:
#   bash scripts/warm_start.sh
#   RUN_ROOT=runs/quickstart/teacher DATA_DIR=runs/quickstart/data MODEL_PATH=runs/quickstart/teacher_model NUM_HEADS=6 \
#       SFT_OPTIONS="trainer.stop_at_accuracy=0.85 trainer.total_training_steps=1000 trainer.test_freq=10" \
#       bash scripts/warm_start.sh
# Measured: greedy accuracy of .25 rises to .65 or more in 24 steps (three seeds), to .77 in 80 (one seed); the teacher's is
# .85.
# With the task's rewards too: distillation.distillation_loss.use_task_rewards=True. Further arguments are passed on.
set -euo pipefail

root=${RUN_ROOT:-runs/quickstart}
export RUN_DIR=${RUN_DIR:-$root/rl_distillation}

exec bash "$(dirname "${BASH_SOURCE[0]}")/quickstart_digits_cpu.sh" \
    distillation.enabled=True \
    distillation.teacher_models.teacher_model.model_path="${TEACHER_PATH:-$root/teacher_model}" \
    actor_rollout_ref.ref.fsdp_config.dtype=float32 \
    distillation.distillation_loss.loss_mode=k1 \
    distillation.distillation_loss.use_policy_gradient=True \
    distillation.distillation_loss.use_task_rewards=False \
    trainer.experiment_name="digits_distillation_seed${SEED:-1}" \
    "$@"
