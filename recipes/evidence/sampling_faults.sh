#!/usr/bin/env bash
# What correction can repair when an engine samples otherwise than asked: two runs at a time, a core each.
#
# Question, minutes and results: docs/evidence.md#sampling_faults. A study that was interrupted goes on. Further arguments are passed on:
# --quick runs one seed of the arms that show the sign of the effect, words choose arms by their names.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m scripts.evidence sampling_faults --cores 0,1 "$@"
