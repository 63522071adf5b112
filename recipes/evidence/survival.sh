#!/usr/bin/env bash
# What of an update is left after the engine's rounding, and whether accuracy follows it: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#survival. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence survival --cores 0,1 "$@"
