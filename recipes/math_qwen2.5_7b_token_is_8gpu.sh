#!/usr/bin/env bash
# MATH with Qwen2.5-7B on one node of 8 GPUs: GRPO with token-level truncated importance sampling. The recipes named math_*
# change one thing about this one each.
#
# Hardware: 8 GPUs of 80 GB with bf16 (trainer and engines share them), 128 GiB of memory. Estimated
# (verl_rc/report/memory.py): 51 GiB a GPU while the actor is updated, two thirds of it for logits of a micro-batch, 61 GiB
# while engines sample. Never run here.
# With 40 GB a GPU pass
# actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 actor_rollout_ref.rollout.gpu_memory_utilization=0.5.
# Method: GRPO (arXiv:2402.03300); weights min(train/rollout, 2) of every token, which Yao et al. 2025 introduced as
# truncated importance sampling. Batch sizes are those of verl's 7B examples of rollout correction.
# Data: python scripts/prepare_data/math_dataset.py --output_dir data/math   (7,500 problems to train on, 5,000 to test)
# Expect: rollout_corr/kl in the thousandths of a nat and weights at the cap in less than 1 % of tokens (a bf16 engine and a
# bf16 trainer disagree little), and accuracy on the test split that rises for the first hundred steps. One epoch is 58
# steps.
set -euo pipefail

model_path=${MODEL_PATH:-Qwen/Qwen2.5-7B}
data_dir=${DATA_DIR:-data/math}
run_dir=${RUN_DIR:-runs/math_qwen2.5_7b_token_is}
seed=${SEED:-1}

prompts_per_step=128
samples_per_prompt=8
prompts_per_update=32
max_prompt_length=1024
max_response_length=4096
tokens_per_micro_batch=16384
epochs=10

exec "${PYTHON:-python}" -m verl_rc.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.preset=decoupled_token_is \
    algorithm.rollout_correction.diagnostics=full \
    data.train_files="$data_dir/train.parquet" \
    data.val_files="$data_dir/test.parquet" \
    data.train_batch_size=$prompts_per_step \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$model_path" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$prompts_per_update \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_micro_batch \
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 \
    actor_rollout_ref.actor.fsdp_config.dtype=bfloat16 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$samples_per_prompt \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.max_num_seqs=512 \
    trainer.device=cuda \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=$epochs \
    trainer.val_before_train=True \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.log_val_generations=8 \
    trainer.seed="$seed" \
    trainer.project_name=verl_rc_math \
    trainer.experiment_name="qwen2.5_7b_token_is_seed$seed" \
    trainer.default_local_dir="$run_dir" \
    "trainer.logger=['console','wandb']" \
    "$@"
