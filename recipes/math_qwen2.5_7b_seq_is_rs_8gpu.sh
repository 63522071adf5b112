#!/usr/bin/env bash
# MATH with Qwen2.5-7B: sequence-level importance weights, and rejection of sequences whose ratio has left a band.
#
# Hardware and data: as recipes/math_qwen2.5_7b_token_is_8gpu.sh, which this calls.
# Method: weights min(product of train/rollout, 2) and a product between 0.5 and 2 or the whole row is rejected (preset
# decoupled_seq_is_rs; verl's November 2025 release called it seq_is_rs). Unbiased up to both cuts, but a product over
# thousands of tokens multiplies the gap of each.
# Expect: rollout_corr/rollout_rs_seq_masked_fraction to grow with the length of responses. Above 0.3 widen
# algorithm.rollout_correction.rollout_rs_threshold, or take a rule on means (recipes/math_qwen2.5_7b_geo_rs_8gpu.sh). Never
# run here.
set -euo pipefail

export CORRECTION=${CORRECTION:-decoupled_seq_is_rs} RUN_DIR=${RUN_DIR:-runs/math_qwen2.5_7b_seq_is_rs}

exec bash "$(dirname "${BASH_SOURCE[0]}")/math_qwen2.5_7b_token_is_8gpu.sh" \
    trainer.experiment_name="qwen2.5_7b_seq_is_rs_seed${SEED:-1}" \
    "$@"
