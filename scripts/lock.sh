#!/usr/bin/env bash
# Writes requirements/cpu-lock.txt and requirements/gpu-lock.txt, the versions that scripts/install.sh takes, from
# pyproject.toml: bash scripts/lock.sh
#
# Versions that are there and still allowed stay; remove a file first to take the newest of everything. Needs the uv of an
# installed environment (VERL_RC_VENV, default .venv). For Python 3.11 and 3.12 and all platforms, by markers.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${VERL_RC_VENV:-.venv}"
export UV_HTTP_TIMEOUT=180
[[ -z "${PIP_CERT:-}" ]] || export SSL_CERT_FILE="$PIP_CERT"

lock() { # device, torch's build, further arguments of uv
  local device="$1" torch="$2" file="requirements/$1-lock.txt" found
  local arguments=(--universal --python-version 3.11 --no-header --no-annotate --quiet) argument
  shift 2
  while read -r argument; do
    arguments+=("$argument")
  done < <("$venv/bin/python" scripts/pip_settings_for_uv.py)
  for argument in "$device" dev ray tensorboard wandb-workspaces; do
    arguments+=(--extra "$argument")
  done
  touch "$file"
  "$venv/bin/uv" pip compile pyproject.toml "${arguments[@]}" "$@" --constraint <(printf '%s\n' "$torch") --output-file "$file" >/dev/null
  # A constraint to a version holds for its CPU build, too; what is left out needs none.
  found="$(sed -e 's/^\(torch==[0-9.]*\)+cpu/\1/' -e "/== 'never'/d" "$file")"
  printf '%s\n' "# Written by scripts/lock.sh from pyproject.toml, read by scripts/install.sh." "$found" >"$file"
}

lock cpu "torch==2.13.0+cpu" --override requirements/cpu-overrides.txt
lock gpu "torch!=2.13.0+cpu"
