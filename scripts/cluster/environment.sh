# Read by the other scripts of this folder: what Ray's processes on every node must agree about with the driver.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
bin="${VERL_RC_VENV:-$root/.venv}/bin"
ray_port="${RAY_PORT:-6379}"
dashboard_port="${RAY_DASHBOARD_PORT:-8265}"

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}
[[ -x "$bin/ray" ]] || fail "no Ray in $bin: bash scripts/install.sh gpu, or name the environment in VERL_RC_VENV."

# As verl_rc/trainer/cluster/ray_session.py sets them for the driver. An engine that shares the trainer's GPUs reserves none from Ray and
# is told which it sees: Ray must not hide them. Workers inherit these from the node's Ray, not from the driver.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_enable_open_telemetry=0
# A run that is told to stop finishes its step and saves it first, for which Ray would leave it 3 seconds.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-1800}"
