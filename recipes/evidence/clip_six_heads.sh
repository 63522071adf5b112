#!/usr/bin/env bash
# Whether bypass mode's clip does harm at 13 tokens with the model of the long answers: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#clip. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence clip_six_heads --cores 0,1 "$@"
