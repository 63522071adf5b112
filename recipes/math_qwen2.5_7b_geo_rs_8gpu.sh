#!/usr/bin/env bash
# MATH with Qwen2.5-7B: rows are rejected by the geometric mean of their ratios, a bound that does not get stricter with
# length; tokens of the rows kept get truncated weights.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: geometric mean of train/rollout over a row between 0.99 and 1.01 (the band of verl's DAPO recipe with rollout
# correction; the preset decoupled_geo_rs_token_tis says 0.999 to 1.001), and weights min(ratio, 2).
# Expect: nearly all rows kept at the start; acceptance (1 - rollout_corr/rollout_rs_seq_masked_fraction) that falls while
# entropy does is the first sign of an engine that drifts away. Pass
# algorithm.rollout_correction.rollout_rs_target_acceptance=0.95 to let the band follow an acceptance instead. Never run
# here.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_geo_rs_token_tis} RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_geo_rs}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01 \
    trainer.experiment_name="qwen2.5_7b_geo_rs_seed${SEED:-1}" \
    "$@"
