#!/usr/bin/env bash
# Whether a gap of the size of rounding changes what is learned: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#exact. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence exact --cores 0,1 "$@"
