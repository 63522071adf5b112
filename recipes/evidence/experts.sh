#!/usr/bin/env bash
# What it costs that a token takes other experts in the engine, and what router replay gives back: two runs at a time, a core
# each.
#
# Question, minutes and results: docs/evidence.md#experts. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence experts --cores 0,1 "$@"
