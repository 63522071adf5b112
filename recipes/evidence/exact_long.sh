#!/usr/bin/env bash
# The same with answers of 49 tokens: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#exact. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence exact_long --cores 0,1 "$@"
