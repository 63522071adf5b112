"""From a configuration to a run that is ready: processes start first, everything else happens while they load."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from verl_rc.cluster.engine_group import EngineGroup
from verl_rc.cluster.placement import Placement, plan_placement
from verl_rc.cluster.remote import wait_for_all
from verl_rc.cluster.trainer_group import TrainerGroup
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import save_resolved_config
from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.run import RunConfig
from verl_rc.data.dataset import build_train_loader, build_validation_rows
from verl_rc.data.tokenize import load_tokenizer
from verl_rc.driver.announce import announced
from verl_rc.driver.run import Run
from verl_rc.metrics.sinks import open_tracker
from verl_rc.ppo.skipped_updates import SkippedUpdateGuard
from verl_rc.rewards import build_reward
from verl_rc.rollout.sampling import EngineOptions
from verl_rc.weight_sync.proof import GapMonitor, engine_precision
from verl_rc.weight_sync.transfer_group import TransferAddress


@contextmanager
def open_run(config: RunConfig, ray_started: "Future[None]") -> Iterator[Run]:
    """Set a run up and take it down again, whatever happens in between."""
    folder = Path(str(config.trainer.default_local_dir))
    folder.mkdir(parents=True, exist_ok=True)
    save_resolved_config(config, folder)
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        with announced("Ray"):
            ray_started.result()
        placement = plan_placement(config)
        trainer, engines = TrainerGroup(placement), EngineGroup(placement)
        building_engines = engines.build(engine_options(config, placement.device))
        with announced("data and tokenizer"), _mistakes_are_the_users():
            tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, config.data.trust_remote_code)
            loader = build_train_loader(config.data, tokenizer, config.trainer.seed)
            validation_rows = build_validation_rows(config.data, tokenizer, config.trainer.seed)
            reward = build_reward(config.reward)
        steps_of_epochs = len(loader) * config.trainer.total_epochs
        total_steps = min(config.trainer.total_training_steps or steps_of_epochs, steps_of_epochs)
        building_ranks = trainer.build(config, total_steps)
        timeout = config.trainer.ready_timeout_seconds
        with announced(f"{trainer.num_ranks} trainer rank(s): torch, model, shards"):
            wait_for_all(building_ranks, timeout)
        stack.callback(trainer.close)
        with announced(f"{engines.num_engines} vLLM engine(s): import and model"):
            wait_for_all(building_engines, timeout)
        with announced("weight-transfer group"):
            connect(trainer, engines, placement, config)
        tracker = open_tracker(
            [*config.trainer.logger, "file"],
            config.trainer.project_name,
            config.trainer.experiment_name,
            folder,
            config.model_dump(mode="json"),
            total_steps,
        )
        stack.callback(tracker.close)
        rollout = config.actor_rollout_ref.rollout
        precision = engine_precision(rollout.dtype, rollout.quantization, rollout.kv_cache_dtype)
        yield Run(
            config=config,
            folder=folder,
            tokenizer=tokenizer,
            stop_token_ids=(tokenizer.eos_token_id,),
            loader=loader,
            validation_rows=validation_rows,
            reward=reward,
            trainer=trainer,
            engines=engines,
            manifest=trainer.manifest(),
            gap_monitor=GapMonitor(precision, rollout.sync_proof.gap_limit),
            canary_monitor=GapMonitor(precision, rollout.sync_proof.gap_limit),
            skipped_updates=SkippedUpdateGuard(config.algorithm.rollout_correction.max_skipped_updates),
            tracker=tracker,
            total_steps=total_steps,
            max_model_len=max_model_length(config),
            block_size=engines.block_size(),
        )


@contextmanager
def _mistakes_are_the_users() -> Iterator[None]:
    """What is wrong with data, tokenizer or reward function is a matter of configuration: one message, no traceback."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def connect(trainer: TrainerGroup, engines: EngineGroup, placement: Placement, config: RunConfig) -> None:
    """Open the weight-transfer group between the first trainer rank and every engine worker."""
    workers = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    host, port = trainer.free_address()
    address = TransferAddress(
        "127.0.0.1" if placement.one_node else host, port, 1 + engines.num_engines * workers
    )
    pending = trainer.join_transfer(address) + engines.join_transfer(address, workers)
    wait_for_all(pending, config.trainer.ready_timeout_seconds)


def max_model_length(config: RunConfig) -> int:
    """Tokens of prompt and response that an engine must hold."""
    return config.actor_rollout_ref.rollout.max_model_len or (
        config.data.max_prompt_length + config.data.max_response_length
    )


def engine_options(config: RunConfig, device: str) -> EngineOptions:
    """The keyword arguments of ``vllm.LLM`` that a configuration means on ``device``."""
    rollout = config.actor_rollout_ref.rollout
    arguments: dict[str, Any] = {
        "quantization": rollout.quantization,
        "kv_cache_dtype": rollout.kv_cache_dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_model_length(config)),
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "seed": rollout.seed,
        "trust_remote_code": config.actor_rollout_ref.model.trust_remote_code,
        "skip_tokenizer_init": True,
        **_memory_arguments(rollout, device),
        **rollout.engine_kwargs.vllm,
    }
    return EngineOptions(
        model_path=config.actor_rollout_ref.model.path,
        dtype=rollout.dtype,
        max_model_len=max_model_length(config),
        response_width=config.data.max_response_length,
        arguments=arguments,
    )


def _memory_arguments(rollout: RolloutConfig, device: str) -> dict[str, Any]:
    """On a CPU the cache's size is given in bytes (a fraction would be one of all RAM) and the engine runs eagerly."""
    if device == "cpu":
        return {"enforce_eager": True, "kv_cache_memory_bytes": (rollout.kv_cache_megabytes or 256) << 20}
    arguments: dict[str, Any] = {"enforce_eager": rollout.enforce_eager}
    if rollout.kv_cache_megabytes is not None:
        return {**arguments, "kv_cache_memory_bytes": rollout.kv_cache_megabytes << 20}
    return {**arguments, "gpu_memory_utilization": rollout.gpu_memory_utilization}
