#!/usr/bin/env bash
# Starts Ray on the first node of a cluster: bash scripts/cluster/start_head.sh [further options of `ray start`]
#
# Prints the line that the other nodes run. Settings: RAY_PORT (6379), RAY_DASHBOARD_PORT (8265), VERL_RC_VENV, RAY_AUTH_MODE
# (token; with disabled anyone who can reach these ports can run code). Stop it with `ray stop`.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Jobs are submitted to the dashboard's port, which needs packages that a single machine does not.
"$bin/python" -c 'import ray.dashboard.optional_deps, smart_open, virtualenv' 2>/dev/null \
  || fail "submitting jobs needs Ray's dashboard: $bin/python -m pip install --editable '.[ray]'"

# Ray asks every process of the cluster for the user's token, by default that of ~/.ray/auth_token.
if [[ "$RAY_AUTH_MODE" == token ]]; then (umask 077 && "$bin/ray" get-auth-token --generate >/dev/null); fi

"$bin/ray" start --head --port="$ray_port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port" "$@"

# Ray returns before its dashboard answers.
"$bin/python" -c "
import time, urllib.error, urllib.request
for attempt in range(60):
    try:
        urllib.request.urlopen('http://127.0.0.1:$dashboard_port/api/version', timeout=5)
        break
    except urllib.error.HTTPError:  # it asks for the token
        break
    except OSError:
        time.sleep(1)
else:
    raise SystemExit(1)
" || fail "Ray runs, but its dashboard does not answer on port $dashboard_port, so that no job can be submitted: see dashboard.log in" \
  "the folder session_latest/logs below Ray's temporary folder (/tmp/ray)."

address="$("$bin/python" -c 'import ray; print(ray.util.get_node_ip_address())')"
if [[ "$RAY_AUTH_MODE" == token ]]; then printf 'Every node needs the same token: ~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH.\n'; fi
printf 'On every other node: bash scripts/cluster/start_worker.sh %s:%s\n' "$address" "$ray_port"
printf 'Then here:           bash scripts/cluster/submit.sh recipes/<recipe>.sh [override ...]\n'
