#!/usr/bin/env bash
# What engines in bf16 and fp8 cost, and what correction gives back: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#quantised. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence quantised --cores 0,1 "$@"
