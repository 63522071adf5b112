#!/usr/bin/env bash
# Joins this node to a cluster: bash scripts/cluster/start_worker.sh HEAD_ADDRESS:PORT [further options of `ray start`]
#
# The checkout and the environment must lie at the same path on every node, on a file system they share or in the same image.
# Settings: VERL_RC_VENV, RAY_AUTH_MODE as on the head. Leave the cluster with `ray stop`.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

(($# >= 1)) || fail "say where the head is: bash scripts/cluster/start_worker.sh HEAD_ADDRESS:$ray_port"
head_address="$1"
shift
"$bin/ray" start --address="$head_address" "$@"
