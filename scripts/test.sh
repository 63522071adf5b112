#!/usr/bin/env bash
# Installs what is needed, then checks style, types, import contracts and runs the tests: bash scripts/test.sh [pytest arguments]
#
# Examples: bash scripts/test.sh tests/unit -x        bash scripts/test.sh -m slow
# VERL_RC_TEST_STEPS picks the steps (default: "lint format types imports pytest").
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# Images for containers like to set it. Every process that a test starts would then compile what it imports: some 10 s for vLLM.
unset PYTHONDONTWRITEBYTECODE
bash "$root/scripts/install.sh" cpu --dev
bin="${VERL_RC_VENV:-$root/.venv}/bin"
cd "$root"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
export RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 WANDB_MODE=offline

# ---- Leave nothing behind. Every process that this run starts inherits the marker, however it is renamed or orphaned.
export VERL_RC_TEST_RUN="$$.$RANDOM$RANDOM"
RAY_TMPDIR="$(mktemp -d /tmp/vrc.XXXXXX)" # short: Ray puts sockets with long names below it
export RAY_TMPDIR
# Without a job name of ours, shared memory belongs to us if it is new since the start and no process has it mapped.
shared_memory_before="$(ls /dev/shm 2>/dev/null || true)"

stray_processes() {
  local environment pid
  for environment in /proc/[0-9]*/environ; do
    pid="${environment//[^0-9]/}"
    if [[ "$pid" != "$$" && "$pid" != "${BASHPID:-}" ]] && grep -qzxF "VERL_RC_TEST_RUN=$VERL_RC_TEST_RUN" "$environment" 2>/dev/null; then
      printf '%s\n' "$pid"
    fi
  done
}

clean_up() {
  local pid segment
  for pid in $(stray_processes); do
    kill -KILL "$pid" 2>/dev/null || true
  done
  for _ in {1..50}; do # what a process has mapped is freed a moment after it was killed
    [[ -n "$(stray_processes)" ]] || break
    sleep 0.1
  done
  for segment in /dev/shm/psm_*; do
    if [[ -O "$segment" ]] && ! grep -qxF "$(basename "$segment")" <<<"$shared_memory_before" \
      && ! grep -qF "$segment" /proc/[0-9]*/maps 2>/dev/null; then
      rm -f "$segment"
    fi
  done
  rm -rf "$RAY_TMPDIR"
}
trap clean_up EXIT

# ---- Every step runs, so that one call shows everything that is wrong.
failed=()
check() {
  local name="$1" started=$SECONDS
  shift
  [[ " ${VERL_RC_TEST_STEPS:-lint format types imports pytest} " == *" $name "* ]] || return 0
  printf '\n==== %s: %s\n' "$name" "$*"
  "$@" || failed+=("$name")
  printf '==== %s took %d s\n' "$name" "$((SECONDS - started))"
}

check lint "$bin/ruff" check .
check format "$bin/ruff" format --check .
check types "$bin/mypy"
check imports "$bin/lint-imports" --no-logo
# Two processes; tests that share a run or a Ray stay in one of them (tests/conftest.py).
check pytest "$bin/python" -m pytest -n 2 --no-loadscope-reorder "$@"

if ((${#failed[@]})); then
  printf '\ntest: FAILED: %s\n' "${failed[*]}"
  exit 1
fi
printf '\ntest: all passed in %d s\n' "$SECONDS"
