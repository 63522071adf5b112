#!/usr/bin/env bash
# Starts Ray on the first node of a cluster: bash scripts/cluster/start_head.sh [further options of `ray start`]
#
# Prints the line that the other nodes run. Settings: RAY_PORT (6379), RAY_DASHBOARD_PORT (8265), VERL_RC_VENV, RAY_AUTH_MODE
# (disabled; anyone who can reach these ports can run code, so keep them inside a private network). Stop it with `ray stop`.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Jobs are submitted to the dashboard's port, which needs packages that a single machine does not.
"$bin/python" -c 'import ray.dashboard.optional_deps, smart_open, virtualenv' 2>/dev/null \
  || fail "submitting jobs needs Ray's dashboard: $bin/python -m pip install --editable '.[ray]'"

"$bin/ray" start --head --port="$ray_port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port" "$@"

# Ray returns before its dashboard answers.
"$bin/python" -c "
import time, urllib.request
for attempt in range(60):
    try:
        urllib.request.urlopen('http://127.0.0.1:$dashboard_port/api/version', timeout=5)
        break
    except OSError:
        time.sleep(1)
else:
    raise SystemExit(1)
" || fail "Ray runs, but its dashboard does not answer on port $dashboard_port, so that no job can be submitted: see dashboard.log in" \
  "the folder session_latest/logs below Ray's temporary folder (/tmp/ray)."

address="$("$bin/python" -c 'import ray; print(ray.util.get_node_ip_address())')"
printf 'On every other node: bash scripts/cluster/start_worker.sh %s:%s\n' "$address" "$ray_port"
printf 'Then here:           bash scripts/cluster/submit.sh recipes/<recipe>.sh [override ...]\n'
