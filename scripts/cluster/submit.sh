#!/usr/bin/env bash
# Runs a recipe on a cluster: bash scripts/cluster/submit.sh RECIPE [override ...]
#
# Run on the head node. The recipe starts on the head, in the checkout, with the cluster's Ray; further arguments are overrides that
# win. Settings of the recipe (MODEL, MODEL_PATH, CORRECTION, DATA_DIR, RUN_DIR, RUN_ROOT, SEED, NNODES), HF_HOME, HF_HUB_OFFLINE,
# WANDB_MODE, WANDB_ENTITY and WANDB_BASE_URL are passed on when they are set. Keys are not: everybody who sees the dashboard would
# read them; log in on the head (`wandb login`, `hf auth login`). RAY_DASHBOARD_ADDRESS (http://127.0.0.1:8265) says where the
# dashboard is. What was submitted stays in runs/jobs. The output follows until the run ends; NO_WAIT=1 returns at once, and
# `ray job logs -f JOB` shows the output then.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

(($# >= 1)) || fail "say which recipe: bash scripts/cluster/submit.sh recipes/<recipe>.sh [override ...]"
[[ -f "$1" ]] || fail "there is no recipe $1."
recipe="$(realpath "$1")"
shift

# Ray puts a command together without quoting it for a shell, so arguments travel in a file of the shared checkout.
job="$root/runs/jobs/$(date +%Y%m%d_%H%M%S)_$$_$(basename "$recipe")"
mkdir -p "$(dirname "$job")"
{
  printf '#!/usr/bin/env bash\nset -euo pipefail\ncd %q\n' "$root"
  for name in MODEL MODEL_PATH CORRECTION DATA_DIR RUN_DIR RUN_ROOT SEED NNODES HF_HOME HF_HUB_OFFLINE \
    WANDB_MODE WANDB_ENTITY WANDB_BASE_URL; do
    if [[ -n "${!name:-}" ]]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
  done
  printf 'export PYTHON=%q\nexec bash' "$bin/python"
  printf ' %q' "$recipe" ray_kwargs.ray_init.address=auto "$@"
  printf '\n'
} >"$job"
exec "$bin/ray" job submit --address="${RAY_DASHBOARD_ADDRESS:-http://127.0.0.1:$dashboard_port}" ${NO_WAIT:+--no-wait} \
  -- bash "$job"
