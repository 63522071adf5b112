#!/usr/bin/env bash
# DAPO-Math-17k with Qwen2.5-32B on 16 nodes of 8 GPUs: DAPO with sequence weights and geometric rejection.
#
# Hardware: 16 x 8 GPUs of 80 GB with bf16 and fast links between nodes, 256 GiB of memory a node, a file system that all
# nodes see. A Ray cluster first: docs/cluster.md. There is no sequence parallelism here: a GPU holds a whole row of 22,528
# tokens in a micro-batch, which makes 72 GiB in an update (estimated); with less room lower max_response_length. Never run
# here.
# Method: DAPO (arXiv:2503.14476): dynamic sampling, clip-higher, token-mean, overlong penalty. Its correction is that of
# verl's recipe (run_dapo_qwen2.5_32b_rollout_corr.sh): normalised sequence weights cut at 2, rows outside a geometric mean
# of 0.99 to 1.01 rejected.
# Data: the parquet files of BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024 on the Hugging Face hub, as
# data/dapo_math/train.parquet and data/dapo_math/test.parquet.
# Expect: training/filter_groups/* to show how many prompts a step has to draw (twice as many as it trains on, more later),
# responses that grow towards the limit, AIME accuracy that rises over thousands of updates (the paper: 50 points after some
# 5,000, on Qwen2.5-32B).
set -euo pipefail

model_path=${MODEL_PATH:-Qwen/Qwen2.5-32B}
data_dir=${DATA_DIR:-data/dapo_math}
run_dir=${RUN_DIR:-runs/dapo_qwen2.5_32b_rollout_corr}
seed=${SEED:-1}
nodes=${NNODES:-16}

prompts_per_step=512
prompts_per_draw=1536
samples_per_prompt=16
prompts_per_update=32
max_prompt_length=2048
max_response_length=20480
overlong_buffer=4096
tokens_per_row=$((max_prompt_length + max_response_length))
epochs=10

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.rollout_correction.preset=decoupled_geo_rs_seq_tis \
    algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01 \
    algorithm.rollout_correction.rollout_is_batch_normalize=True \
    algorithm.rollout_correction.diagnostics=full \
    data.train_files="$data_dir/train.parquet" \
    data.val_files="$data_dir/test.parquet" \
    data.train_batch_size=$prompts_per_step \
    data.gen_batch_size=$prompts_per_draw \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    data.truncation=left \
    actor_rollout_ref.model.path="$model_path" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$prompts_per_update \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_row \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.fsdp_config.dtype=bfloat16 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$samples_per_prompt \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.max_num_batched_tokens=$tokens_per_row \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    reward.reward_kwargs.overlong_buffer_cfg.enable=True \
    reward.reward_kwargs.overlong_buffer_cfg.len=$overlong_buffer \
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    reward.reward_kwargs.max_resp_len=$max_response_length \
    ray_kwargs.ray_init.address=auto \
    trainer.device=cuda \
    trainer.nnodes="$nodes" \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=$epochs \
    trainer.val_before_train=True \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    trainer.max_actor_ckpt_to_keep=3 \
    trainer.ready_timeout_seconds=1200 \
    trainer.seed="$seed" \
    trainer.project_name=verl_rc_dapo \
    trainer.experiment_name="dapo_qwen2.5_32b_rollout_corr_seed$seed" \
    trainer.default_local_dir="$run_dir" \
    "trainer.logger=['console','wandb']" \
    "$@"
