#!/usr/bin/env bash
# MATH with Qwen2.5-32B on 4 nodes of 8 GPUs: PPO with a critic of the same size, and token weights truncated at 10.
#
# Hardware: 4 x 8 GPUs of 80 GB with bf16 and fast links between nodes, 512 GiB of memory a node (weights and moments of
# actor and critic wait there: some 250 GiB), a file system that all nodes see. A Ray cluster first:
# docs/cluster.md. Estimated: 35 GiB a GPU in an update, 57 GiB while engines sample; gradients are reduced after every
# micro-batch, as whole ones would make it 150 GiB. Never run here.
# Method: PPO (arXiv:1707.06347) with GAE at gamma = lambda = 1, a critic that trains alone for the first 4 steps, and
# truncated importance sampling (Yao et al. 2025) with a cap of 10: wide enough to leave nearly every token unbiased, tight
# enough to stop single tokens.
# Data: python scripts/prepare_data/math_dataset.py --output_dir data/math
# Expect: critic/vf_explained_var above 0 after the warm-up and above 0.3 later, weights at the cap in one of ten thousand
# tokens. One epoch is 14 steps.
set -euo pipefail

seed=${SEED:-1}
tokens_per_micro_batch=8192

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    task=math model="${MODEL:-qwen2.5_32b}" hardware=2x8gpu correction="${CORRECTION:-decoupled_token_is}" \
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    algorithm.lam=1.0 \
    algorithm.rollout_correction.rollout_is_threshold=10.0 \
    ${MODEL_PATH:+"actor_rollout_ref.model.path=$MODEL_PATH"} \
    ${DATA_DIR:+"data.train_files=$DATA_DIR/train.parquet" "data.val_files=$DATA_DIR/test.parquet"} \
    data.train_batch_size=512 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_micro_batch \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_num_seqs=512 \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=$tokens_per_micro_batch \
    critic.fsdp_config.param_offload=True \
    critic.fsdp_config.optimizer_offload=True \
    trainer.nnodes="${NNODES:-4}" \
    trainer.critic_warmup=5 \
    trainer.seed="$seed" \
    trainer.experiment_name="ppo_qwen2.5_32b_token_is_seed$seed" \
    trainer.default_local_dir="${RUN_DIR:-runs/ppo_qwen2.5_32b_token_is}" \
    "$@"
