#!/usr/bin/env bash
# DAPO-Math-17k with Qwen2.5-32B on 16 nodes of 8 GPUs: DAPO with sequence weights and geometric rejection.
#
# Hardware: 16 x 8 GPUs of 80 GB with bf16 and fast links between nodes, 256 GiB of memory a node, a file system that all
# nodes see. A Ray cluster first: docs/cluster.md. There is no sequence parallelism here: a GPU holds a whole row of 22,528
# tokens in a micro-batch. Estimated: 39 GiB a GPU in an update, 70 GiB while engines sample; gradients are reduced after every
# micro-batch, as whole ones would make it 157 GiB. Never run here.
# Method: DAPO (arXiv:2503.14476): dynamic sampling, clip-higher, token-mean, overlong penalty. Its correction is that of
# verl's recipe (run_dapo_qwen2.5_32b_rollout_corr.sh): normalised sequence weights cut at 2, rows outside a geometric mean
# of 0.99 to 1.01 rejected.
# Data: the parquet files of BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024 on the Hugging Face hub, as
# data/dapo_math/train.parquet and data/dapo_math/test.parquet.
# Expect: training/filter_groups/* to show how many prompts a step has to draw (twice as many as it trains on, more later),
# responses that grow towards the limit, AIME accuracy that rises over thousands of updates (the paper: 50 points after some
# 5,000, on Qwen2.5-32B).
set -euo pipefail

seed=${SEED:-1}

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    task=dapo_math model="${MODEL:-qwen2.5_32b}" hardware=2x8gpu correction="${CORRECTION:-decoupled_geo_rs_seq_tis}" \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01 \
    algorithm.rollout_correction.rollout_is_batch_normalize=True \
    algorithm.rollout_correction.diagnostics=full \
    ${MODEL_PATH:+"actor_rollout_ref.model.path=$MODEL_PATH"} \
    ${DATA_DIR:+"data.train_files=$DATA_DIR/train.parquet" "data.val_files=$DATA_DIR/test.parquet"} \
    data.gen_batch_size=1536 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    reward.reward_kwargs.overlong_buffer_cfg.enable=True \
    reward.reward_kwargs.overlong_buffer_cfg.len=4096 \
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.nnodes="${NNODES:-16}" \
    trainer.seed="$seed" \
    trainer.experiment_name="dapo_qwen2.5_32b_rollout_corr_seed$seed" \
    trainer.default_local_dir="${RUN_DIR:-runs/dapo_qwen2.5_32b_rollout_corr}" \
    "$@"
