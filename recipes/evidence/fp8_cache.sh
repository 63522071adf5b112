#!/usr/bin/env bash
# An fp8 cache: vLLM's own, which needs AVX-512, against the emulated one: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#fp8_cache. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence fp8_cache --cores 0,1 "$@"
