"""Every key arrives: at the object that is made of it, else at the module that reads it.

Values are none of the defaults. The keys of ``algorithm.rollout_correction`` have such a test of their own.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sound_run import sound_run

from verl_rc.checkpoint import RunState
from verl_rc.cluster import placement
from verl_rc.cluster.ray_session import start_ray
from verl_rc.config.actor import OptimConfig
from verl_rc.config.algorithms import LossOptions
from verl_rc.config.async_checks import UNBUILT
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import known_keys
from verl_rc.config.verl_keys import moved
from verl_rc.data.dataset import PromptOptions
from verl_rc.driver import stages
from verl_rc.driver.services import Services
from verl_rc.driver.setup import engine_options
from verl_rc.driver.step_record import StepRecord
from verl_rc.losses import loss_options
from verl_rc.ppo.choices import actor_limit, critic_limit, log_prob_limit, reference_limit
from verl_rc.ppo.control import Control
from verl_rc.rollout.sampling import SamplingOptions
from verl_rc.workers.optimizer import build_optimizer, build_scheduler

PACKAGE = Path(stages.__file__).parents[1]


def load(overrides: str) -> RunConfig:
    given = overrides.split()
    keys = {override.partition("=")[0] for override in given}
    return load_run_config([*sound_run("gae", without=keys), *given])


def optimizer(config: OptimConfig) -> dict[str, Any]:
    group: dict[str, Any] = build_optimizer([torch.nn.Parameter(torch.zeros(1))], config).param_groups[0]
    return group


def rates(config: OptimConfig, steps: int = 8) -> list[float]:
    """Learning rates of ten steps relative to the peak."""
    schedule = build_scheduler(build_optimizer([torch.nn.Parameter(torch.zeros(1))], config), config, steps)
    factor = cast(Callable[[int], float], schedule.lr_lambdas[0])
    return [round(factor(step), 3) for step in range(steps + 1)]


def mini_batches(config: RunConfig, update: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ``MiniBatchOptions`` that a stage of the loop cuts its batch with."""
    seen = []

    def stop(*arguments: Any) -> None:
        seen.append(arguments[2])
        raise InterruptedError

    monkeypatch.setattr(stages, "plan_mini_batches", stop)
    monkeypatch.setattr(stages, "critic_batch", lambda *_: SimpleNamespace(response_mask=None))
    monkeypatch.setattr(stages, "critic_metrics", lambda _: {})
    batch = SimpleNamespace(response_mask=None, loss_mask=None)
    control = Control.of(config.algorithm)
    arguments = (batch, SimpleNamespace(), 1) if update is stages.update_critic else (RunState(), batch, control)
    services = cast(Services, SimpleNamespace(config=config, critic=object()))
    with pytest.raises(InterruptedError):
        update(services, *arguments, StepRecord())
    return seen[0]


A, R, V = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"
ENGINE: list[tuple[str, str, Any]] = [
    (f"{R}.tensor_model_parallel_size=4", "tensor_parallel_size", 4),
    (f"{R}.gpu_memory_utilization=0.8", "gpu_memory_utilization", 0.8),
    (f"{R}.kv_cache_megabytes=2", "kv_cache_memory_bytes", 2 << 20),
    (f"{R}.kv_cache_dtype=fp8", "kv_cache_dtype", "fp8"),
    (f"{R}.quantization=fp8", "quantization", "fp8"),
    (f"{R}.load_format=safetensors", "load_format", "safetensors"),
    (f"{R}.enforce_eager=True", "enforce_eager", True),
    (f"{R}.free_cache_engine=False", "enable_sleep_mode", None),
    (f"{R}.free_cache_engine=True", "enable_sleep_mode", True),
    (f"{R}.enable_chunked_prefill=False", "enable_chunked_prefill", False),
    (f"{R}.enable_prefix_caching=False", "enable_prefix_caching", False),
    (f"{R}.max_num_batched_tokens=20000", "max_num_batched_tokens", 20000),
    (f"{R}.max_num_seqs=64", "max_num_seqs", 64),
    (f"{R}.seed=7", "seed", 7),
    (f"+{R}.engine_kwargs.vllm.block_size=32", "block_size", 32),
    ("actor_rollout_ref.model.trust_remote_code=True", "trust_remote_code", True),
]


@pytest.mark.parametrize(("override", "argument", "value"), ENGINE, ids=[row[0] for row in ENGINE])
def test_arguments_of_the_engine(override: str, argument: str, value: Any) -> None:
    assert engine_options(load(override), "cuda").arguments.get(argument) == value


OBJECTS: list[tuple[str, Callable[[RunConfig], Any], Any]] = [
    ("actor_rollout_ref.model.path=org/other", lambda c: engine_options(c, "cuda").model_path, "org/other"),
    (f"{R}.dtype=float16", lambda c: engine_options(c, "cuda").dtype, "float16"),
    (f"{R}.max_model_len=4000", lambda c: engine_options(c, "cuda").max_model_len, 4000),
    ("data.max_prompt_length=100", lambda c: engine_options(c, "cuda").max_model_len, 612),
    ("data.max_response_length=100", lambda c: engine_options(c, "cuda").response_width, 100),
    (f"{R}.temperature=0.7", lambda c: SamplingOptions.for_training(c.actor_rollout_ref.rollout, ()).temperature, 0.7),
    (f"{R}.ignore_eos=True", lambda c: SamplingOptions.for_training(c.actor_rollout_ref.rollout, ()).ignore_eos, True),
    (f"{R}.response_length=99", lambda c: SamplingOptions.for_training(c.actor_rollout_ref.rollout, ()).max_tokens, 99),
    ("data.max_response_length=98", lambda c: SamplingOptions.for_training(c.actor_rollout_ref.rollout, ()).max_tokens, 98),
    (f"{R}.top_p=1", lambda c: SamplingOptions.for_training(c.actor_rollout_ref.rollout, ()).top_p, 1.0),
    (f"{R}.top_k=0", lambda c: SamplingOptions.for_training(c.actor_rollout_ref.rollout, ()).top_k, 0),
    (f"{V}.temperature=0.6", lambda c: validation(c).temperature, 0.6),
    (f"{V}.temperature=0.6 {V}.do_sample=False", lambda c: validation(c).temperature, 0.0),
    (f"{V}.temperature=0.6 {V}.do_sample=True", lambda c: validation(c).temperature, 0.6),
    (f"{V}.top_p=0.7", lambda c: validation(c).top_p, 0.7),
    (f"{V}.top_k=20", lambda c: validation(c).top_k, 20),
    (f"{A}.optim.lr=3e-6", lambda c: optimizer(c.actor_rollout_ref.actor.optim)["lr"], 3e-6),
    (f"{A}.optim.weight_decay=0.1", lambda c: optimizer(c.actor_rollout_ref.actor.optim)["weight_decay"], 0.1),
    (f"{A}.optim.betas=[0.8,0.95]", lambda c: optimizer(c.actor_rollout_ref.actor.optim)["betas"], (0.8, 0.95)),
    ("critic.optim.lr=3e-6", lambda c: optimizer(c.critic.optim)["lr"], 3e-6),
    ("critic.optim.weight_decay=0.1", lambda c: optimizer(c.critic.optim)["weight_decay"], 0.1),
    ("critic.optim.betas=[0.8,0.95]", lambda c: optimizer(c.critic.optim)["betas"], (0.8, 0.95)),
    (f"{A}.optim.lr_warmup_steps=3", lambda c: rates(c.actor_rollout_ref.actor.optim)[:4], [0.25, 0.5, 0.75, 1.0]),
    (f"{A}.optim.lr_warmup_steps_ratio=0.125", lambda c: rates(c.actor_rollout_ref.actor.optim)[:2], [0.5, 1.0]),
    (f"{A}.optim.lr_scheduler_type=cosine", lambda c: rates(c.actor_rollout_ref.actor.optim)[::4], [1.0, 0.5, 0.0]),
    (f"{A}.optim.warmup_style=cosine", lambda c: rates(c.actor_rollout_ref.actor.optim)[::4], [1.0, 0.5, 0.0]),
    (
        f"{A}.optim.lr_scheduler_type=linear {A}.optim.min_lr_ratio=0.5",
        lambda c: rates(c.actor_rollout_ref.actor.optim)[::4],
        [1.0, 0.75, 0.5],
    ),
    (
        f"{A}.optim.lr_scheduler_type=cosine {A}.optim.num_cycles=1",
        lambda c: rates(c.actor_rollout_ref.actor.optim)[::4],
        [1.0, 0.0, 1.0],
    ),
    ("critic.optim.lr_warmup_steps=1", lambda c: rates(c.critic.optim)[:2], [0.5, 1.0]),
    (f"{A}.grad_clip=0.5", lambda c: c.actor_rollout_ref.actor.optim.clip_grad, 0.5),
    ("critic.grad_clip=0.5", lambda c: c.critic.optim.clip_grad, 0.5),
    ("critic.fsdp.param_offload=True", lambda c: c.critic.fsdp_config.param_offload, True),
    ("critic.model.fsdp_config.optimizer_offload=True", lambda c: c.critic.fsdp_config.optimizer_offload, True),
    ("actor_rollout_ref.ref.model.path=org/ref", lambda c: c.actor_rollout_ref.ref.model_path, "org/ref"),
    (f"{A}.ppo_max_token_len_per_gpu=5000", lambda c: actor_limit(c).max_tokens, 5000),
    (f"{A}.ppo_max_token_len_per_gpu=5000", lambda c: log_prob_limit(c).max_tokens, 5000),
    (f"{A}.ppo_max_token_len_per_gpu=5000", lambda c: reference_limit(c).max_tokens, 5000),
    (f"{A}.use_dynamic_bsz=False {A}.ppo_micro_batch_size_per_gpu=3", lambda c: actor_limit(c).max_rows, 3),
    (f"{A}.use_dynamic_bsz=False {A}.ppo_micro_batch_size_per_gpu=3", lambda c: log_prob_limit(c).max_rows, 3),
    (f"{R}.log_prob_max_token_len_per_gpu=6000", lambda c: log_prob_limit(c).max_tokens, 6000),
    (f"{R}.log_prob_use_dynamic_bsz=False {R}.log_prob_micro_batch_size_per_gpu=5", lambda c: log_prob_limit(c).max_rows, 5),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=7000", lambda c: reference_limit(c).max_tokens, 7000),
    (
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=6",
        lambda c: reference_limit(c).max_rows,
        6,
    ),
    ("critic.ppo_max_token_len_per_gpu=8000", lambda c: critic_limit(c).max_tokens, 8000),
    ("critic.use_dynamic_bsz=False critic.ppo_micro_batch_size_per_gpu=9", lambda c: critic_limit(c).max_rows, 9),
    (f"{A}.clip_ratio=0.3", lambda c: losses(c).clip_ratio_low, 0.3),
    (f"{A}.clip_ratio=0.3", lambda c: losses(c).clip_ratio_high, 0.3),
    (f"{A}.clip_ratio_low=0.1", lambda c: losses(c).clip_ratio_low, 0.1),
    (f"{A}.clip_ratio_high=0.28", lambda c: losses(c).clip_ratio_high, 0.28),
    (f"{A}.clip_ratio_c=10.0", lambda c: losses(c).clip_ratio_c, 10.0),
    (f"{A}.tau_pos=1.5", lambda c: losses(c).tau_pos, 1.5),
    (f"+{A}.policy_loss.tau_neg=1.6", lambda c: losses(c).tau_neg, 1.6),
    (f"{A}.policy_loss.clip_cov_ratio=0.1", lambda c: losses(c).clip_cov_ratio, 0.1),
    (f"{A}.policy_loss.clip_cov_lb=2.0", lambda c: losses(c).clip_cov_lb, 2.0),
    (f"{A}.policy_loss.clip_cov_ub=6.0", lambda c: losses(c).clip_cov_ub, 6.0),
    (f"{A}.policy_loss.kl_cov_ratio=0.1", lambda c: losses(c).kl_cov_ratio, 0.1),
    (f"{A}.policy_loss.ppo_kl_coef=0.2", lambda c: losses(c).ppo_kl_coef, 0.2),
    (f"{A}.policy_loss.loss_mode=dro {A}.policy_loss.dro_beta=0.3", lambda c: losses(c).dro_beta, 0.3),
    ("algorithm.kl_ctrl.kl_coef=0.01", lambda c: Control.of(c.algorithm).kl.kl_coef, 0.01),
    ("algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2", lambda c: Control.of(c.algorithm).kl.target_kl, 0.2),
    ("algorithm.kl_ctrl.horizon=500", lambda c: Control.of(c.algorithm).kl.horizon, 500),
    ("data.max_prompt_length=100", lambda c: PromptOptions.from_config(c.data).max_prompt_length, 100),
    ("data.truncation=left", lambda c: PromptOptions.from_config(c.data).truncation, "left"),
    ("data.filter_overlong_prompts=True", lambda c: PromptOptions.from_config(c.data).filter_overlong, True),
    ("data.prompt_key=messages", lambda c: PromptOptions.from_config(c.data).prompt_key, "messages"),
    (
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        lambda c: PromptOptions.from_config(c.data).template_arguments,
        {"enable_thinking": False},
    ),
]


def validation(config: RunConfig) -> SamplingOptions:
    return SamplingOptions.for_validation(config.actor_rollout_ref.rollout.val_kwargs, 9, ())


def losses(config: RunConfig) -> LossOptions:
    return loss_options(config.actor_rollout_ref.actor)


@pytest.mark.parametrize(("overrides", "receiver", "value"), OBJECTS, ids=[row[0] for row in OBJECTS])
def test_objects_made_of_the_configuration(overrides: str, receiver: Callable[[RunConfig], Any], value: Any) -> None:
    assert receiver(load(overrides)) == value


MINI_BATCHES: list[tuple[str, Callable[..., None], str, Any]] = [
    (f"{A}.ppo_mini_batch_size=8 {R}.n=4", stages.update_actor, "rows_per_mini_batch", 32),
    (f"{A}.ppo_epochs=3", stages.update_actor, "epochs", 3),
    (f"{A}.shuffle=True", stages.update_actor, "shuffle", True),
    (f"{A}.ppo_mini_batch_size=8", stages.update_critic, "rows_per_mini_batch", 16),
    (f"{A}.ppo_epochs=3", stages.update_critic, "epochs", 3),
    ("critic.ppo_mini_batch_size=4", stages.update_critic, "rows_per_mini_batch", 8),
    ("critic.ppo_epochs=2", stages.update_critic, "epochs", 2),
    ("critic.shuffle=True", stages.update_critic, "shuffle", True),
]


@pytest.mark.parametrize(("overrides", "update", "field", "value"), MINI_BATCHES)
def test_mini_batches(
    overrides: str, update: Callable[..., None], field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(mini_batches(load(overrides), update, monkeypatch), field) == value


PLACES: list[tuple[str, str, Any]] = [
    ("trainer.n_gpus_per_node=4", "num_ranks", 4),
    ("trainer.nnodes=2", "num_ranks", 16),
    (f"{R}.tensor_model_parallel_size=4", "num_engines", 2),
    ("actor_rollout_ref.hybrid_engine=False", "shares_devices", False),
    (f"actor_rollout_ref.hybrid_engine=False {R}.nnodes=3", "num_engines", 12),
    (f"actor_rollout_ref.hybrid_engine=False {R}.n_gpus_per_node=2", "num_engines", 1),
    ("trainer.device=cuda", "device", "cuda"),
]


@pytest.mark.parametrize(("overrides", "field", "value"), PLACES)
def test_places_of_processes(overrides: str, field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"CPU": 512.0, "GPU": 512.0})
    monkeypatch.setattr(placement, "_check_nodes", lambda *_: None)
    monkeypatch.setattr(placement, "_reserve", lambda *_: ((), ()))
    assert getattr(placement.plan_placement(load(overrides)), field) == value


RAY: list[tuple[str, str, Any]] = [
    ("ray_kwargs.ray_init.num_cpus=5", "num_cpus", 5),
    ("+ray_kwargs.ray_init.num_gpus=4", "num_gpus", 4),
    ("ray_kwargs.ray_init.object_store_memory=90000000", "object_store_memory", 90_000_000),
    ("ray_kwargs.ray_init.address=auto", "address", "auto"),
    ("ray_kwargs.ray_init.runtime_env.py_executable=uv", "runtime_env", {"py_executable": "uv"}),
]


@pytest.mark.parametrize(("overrides", "argument", "value"), RAY)
def test_arguments_of_ray(overrides: str, argument: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("ray.init", lambda **arguments: seen.update(arguments))
    monkeypatch.setenv("PYTHONPATH", "")
    start_ray(load(overrides).ray_kwargs.ray_init, 1)
    assert seen[argument] == value


READERS = {
    "driver/train.py": "trainer.val_before_train trainer.val_only trainer.test_freq trainer.critic_warmup "
    "trainer.max_nonfinite_updates",
    "driver/setup.py": "trainer.total_epochs trainer.total_training_steps trainer.project_name trainer.experiment_name "
    "trainer.default_local_dir trainer.ready_timeout_seconds trainer.hang_timeout_seconds "
    "actor_rollout_ref.rollout.engine_timeout_seconds trainer.logger algorithm.adv_estimator "
    "actor_rollout_ref.rollout.multi_turn.enable actor_rollout_ref.rollout.sync_proof.gap_limit data.trust_remote_code",
    "driver/checkpoints.py": "trainer.save_freq trainer.resume_mode trainer.resume_from_path trainer.max_actor_ckpt_to_keep",
    "driver/evaluate.py": "trainer.log_val_generations trainer.validation_data_dir data.val_batch_size "
    "actor_rollout_ref.rollout.val_kwargs.n",
    "driver/stages.py": "trainer.rollout_data_dir trainer.seed actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.rollout.n",
    "driver/sample.py": "algorithm.gdpo_reward_keys algorithm.filter_groups.enable algorithm.filter_groups.metric "
    "algorithm.filter_groups.max_num_gen_batches "
    "data.gen_batch_size "
    "reward.reward_kwargs.max_resp_len reward.reward_kwargs.overlong_buffer_cfg.enable "
    "reward.reward_kwargs.overlong_buffer_cfg.len reward.reward_kwargs.overlong_buffer_cfg.penalty_factor "
    "reward.reward_kwargs.overlong_buffer_cfg.log",
    "ppo/train_batch.py": "algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.gamma algorithm.lam "
    "algorithm.norm_adv_by_std_in_grpo algorithm.gdpo_reward_weights",
    "ppo/objective.py": "actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.kl_loss_coef "
    "actor_rollout_ref.actor.kl_loss_type critic.cliprange_value",
    "ppo/choices.py": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "workers/policy_worker.py": "actor_rollout_ref.actor.checkpoint.async_save "
    "actor_rollout_ref.model.use_remove_padding "
    "actor_rollout_ref.model.enable_gradient_checkpointing "
    "actor_rollout_ref.model.lora_rank actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.loss_scale_factor "
    "actor_rollout_ref.actor.fsdp_config.model_dtype",
    "workers/critic_worker.py": "critic.checkpoint.async_save "
    "critic.model.path critic.model.use_remove_padding critic.model.enable_gradient_checkpointing "
    "critic.model.trust_remote_code critic.loss_agg_mode critic.fsdp_config.model_dtype",
    "workers/reference_worker.py": "actor_rollout_ref.ref.model_path actor_rollout_ref.ref.fsdp_config.model_dtype",
    "workers/sharded_model.py": "actor_rollout_ref.actor.fsdp_config.dtype actor_rollout_ref.actor.fsdp_config.param_offload "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload actor_rollout_ref.actor.fsdp_config.reshard_after_forward "
    "actor_rollout_ref.actor.optim.clip_grad critic.optim.clip_grad critic.fsdp_config.dtype critic.fsdp_config.param_offload "
    "critic.fsdp_config.optimizer_offload critic.fsdp_config.reshard_after_forward actor_rollout_ref.ref.fsdp_config.dtype "
    "actor_rollout_ref.ref.fsdp_config.param_offload actor_rollout_ref.ref.fsdp_config.reshard_after_forward",
    "workers/lora.py": "actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.target_modules "
    "actor_rollout_ref.model.exclude_modules",
    "data/dataset.py": "data.train_files data.val_files data.train_batch_size data.shuffle data.train_max_samples "
    "data.val_max_samples data.dataloader_num_workers data.seed data.train_weights",
    "data/custom_dataset.py": "data.custom_cls.path data.custom_cls.name",
    "cluster/weight_transport.py": "actor_rollout_ref.rollout.checkpoint_engine.backend "
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "rollout/agent_loop.py": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns "
    "actor_rollout_ref.rollout.multi_turn.max_user_turns actor_rollout_ref.rollout.multi_turn.max_parallel_calls "
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length actor_rollout_ref.rollout.multi_turn.tools "
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side actor_rollout_ref.rollout.multi_turn.tool_timeout_seconds",
    "rollout/tool_calls.py": "actor_rollout_ref.rollout.multi_turn.format",
    "driver/weights.py": "actor_rollout_ref.rollout.sync_proof.canary_freq "
    "actor_rollout_ref.rollout.sync_proof.canary_num_prompts "
    "actor_rollout_ref.rollout.sync_proof.canary_max_tokens",
    "cluster/reward_pool.py": "reward.num_workers reward.timeout_seconds",
    "rewards/process.py": "reward.memory_limit_megabytes",
    "driver/scoring.py": "reward.on_failure reward.failure_score reward.reward_model.enable",
    "rewards/custom.py": "reward.custom_reward_function.path reward.custom_reward_function.name "
    "reward.custom_reward_function.reward_kwargs",
    "cluster/placement.py": "async_training.staleness_threshold",
    "config/run.py": "critic.enable async_training.require_batches",
    "driver/recovery.py": "actor_rollout_ref.rollout.max_engine_replacements",
    "cluster/ray_session.py": "ray_kwargs.ray_init.loopback_only",
    "driver/guards.py": "trainer.alerts.reward_drop trainer.alerts.reward_window trainer.alerts.mismatch "
    "trainer.alerts.mismatch_limit trainer.alerts.reward_collapse",
    "workers/reward_model_worker.py": "reward.reward_model.model_path reward.reward_model.dtype reward.reward_model.max_length "
    "reward.reward_model.micro_batch_size_per_gpu reward.reward_model.trust_remote_code reward.reward_model.n_gpus_per_node",
}
"""Keys that are read where they act, by the module that does."""


@pytest.mark.parametrize("module", READERS)
def test_keys_that_are_read_where_they_act(module: str) -> None:
    text = (PACKAGE / module).read_text()
    assert not [key for key in READERS[module].split() if not re.search(rf"\b{key.rsplit('.', 1)[1]}\b", text)]


SAY_WHAT_HAPPENS_ANYWAY = {
    *("actor_rollout_ref.actor.strategy", "actor_rollout_ref.ref.strategy", "critic.strategy", "actor_rollout_ref.rollout.name"),
    *("actor_rollout_ref.rollout.mode", "actor_rollout_ref.rollout.calculate_log_probs", "trainer.balance_batch"),
    *("actor_rollout_ref.actor.optim.optimizer", "critic.optim.optimizer"),
    *("actor_rollout_ref.ref.fsdp_config.optimizer_offload", "async_training.partial_rollout"),
    *("async_training.order", "async_training.max_off_policy_threshold"),
}
"""Keys that verl's recipes spell out and of which only one value is possible, or several that mean the same."""


def test_no_key_is_missing_here() -> None:
    rows = [row[0] for row in (*ENGINE, *OBJECTS, *MINI_BATCHES, *PLACES, *RAY)]
    shown = {moved(override.lstrip("+").partition("=")[0]) for row in rows for override in row.split()}
    read = {key for keys in READERS.values() for key in keys.split()}
    known = set(known_keys(RunConfig))
    assert read | SAY_WHAT_HAPPENS_ANYWAY <= known
    arrived = {key for key in known if any(f"{one}.".startswith(f"{key}.") for one in shown | read)}
    assert len(arrived) > 180
    leaves = {key.rsplit(".", 1)[1] for key in arrived}  # critic and reference have sections of the same classes as the actor
    missing = {key for key in known - arrived if not key.startswith("algorithm.rollout_correction.")} - SAY_WHAT_HAPPENS_ANYWAY
    missing -= {f"async_training.{key}" for key in UNBUILT}  # no value that would have to arrive is accepted
    assert not {key for key in missing if key.rsplit(".", 1)[1] not in leaves}
