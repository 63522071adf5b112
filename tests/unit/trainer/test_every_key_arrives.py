"""Values of keys arrive at the objects that are made of them; none of the values is the default.

That every key is read at all where it acts is shown by a real run:
tests/integration/test_every_key_arrives.py.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from small_runs import ROOT
from sound_run import sound_run

from verl_rc.algorithm.losses import loss_options
from verl_rc.config.algorithms import LossOptions
from verl_rc.config.load import load_run_config
from verl_rc.config.models import OptimConfig
from verl_rc.config.run import RunConfig
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.rollout.sampling import SamplingOptions
from verl_rc.runtime.rollout.vllm.options import engine_options
from verl_rc.runtime.workers.sharded_model import build_optimizer, build_scheduler
from verl_rc.trainer import stages
from verl_rc.trainer.cluster import placement, ray_session
from verl_rc.trainer.cluster.ray_session import start_ray
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import Step


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
    """The options that a stage of the loop cuts its batch with."""
    seen = []

    def stop(*masks: Any, **options: Any) -> None:
        seen.append(SimpleNamespace(**options))
        raise InterruptedError

    monkeypatch.setattr(stages, "plan_mini_batches", stop)
    batch = Mock()
    monkeypatch.setattr(stages, "critic_batch", lambda *_: batch)
    monkeypatch.setattr(stages, "critic_metrics", lambda _: {})
    inputs = SimpleNamespace(batch=batch, correction=None)
    arguments = (inputs,) if update is stages.update_critic else (None, inputs)
    services = cast(Services, SimpleNamespace(config=config, critic=object()))
    with pytest.raises(InterruptedError):
        update(services, *arguments, Step.after(RunState(), config))
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
    (f"{R}.top_k=5", "max_logprobs", 21),
    (f"{R}.min_p=0.1 {R}.max_support=7", "max_logprobs", 7),
    (f"{R}.top_k=0", "max_logprobs", None),
    (f"{R}.enable_rollout_routing_replay=True", "enable_return_routed_experts", True),
    ("", "enable_return_routed_experts", None),
    (f"+{R}.engine_kwargs.vllm.block_size=32", "block_size", 32),
    ("actor_rollout_ref.model.trust_remote_code=True", "trust_remote_code", True),
    # also where it is not set: config.json could name a head for the engine alone
    ("actor_rollout_ref.model.head_dtype=null", "hf_overrides", {"head_dtype": "model"}),
    ("actor_rollout_ref.model.head_dtype=float32", "hf_overrides", {"head_dtype": "float32"}),
    (
        f"+{R}.engine_kwargs.vllm.hf_overrides.rope_theta=5",
        "hf_overrides",
        {"rope_theta": 5, "head_dtype": "model"},
    ),
]
EXACT = (
    f"actor_rollout_ref.exact=True {R}.dtype=float32 {A}.fsdp_config.dtype=float32 "
    f"{R}.tensor_model_parallel_size=1"
)


@pytest.mark.parametrize(("override", "argument", "value"), ENGINE, ids=[row[0] for row in ENGINE])
def test_arguments_of_the_engine(override: str, argument: str, value: Any) -> None:
    assert engine_options(load(override), "cuda").arguments.get(argument) == value


def training(config: RunConfig) -> tuple[float, int, float, int]:
    options = SamplingOptions.for_training(config.actor_rollout_ref.rollout, 9, ())
    return options.top_p, options.top_k, options.min_p, options.max_support


OBJECTS: list[tuple[str, Callable[[RunConfig], Any], Any]] = [
    (f"{R}.top_p=0.9 {R}.top_k=5 {R}.min_p=0.1", training, (0.9, 5, 0.1, 21)),
    (f"{R}.top_p=0.9 {R}.max_support=7", training, (0.9, -1, 0.0, 7)),
    ("", training, (1.0, -1, 0.0, 0)),
    ("actor_rollout_ref.model.path=org/other", lambda c: engine_options(c, "cuda").model_path, "org/other"),
    (f"{R}.dtype=float16", lambda c: engine_options(c, "cuda").dtype, "float16"),
    (EXACT, lambda c: engine_options(c, "cpu").exact, True),
    (
        "actor_rollout_ref.model.lora.merge=False actor_rollout_ref.model.lora_rank=3",
        lambda c: engine_options(c, "cpu").adapter_rank,
        3,
    ),
    ("actor_rollout_ref.model.lora_rank=3", lambda c: engine_options(c, "cpu").adapter_rank, 0),
    (f"{R}.max_model_len=4000", lambda c: engine_options(c, "cuda").max_model_len, 4000),
]


def validation(config: RunConfig) -> SamplingOptions:
    return SamplingOptions.for_validation(config.actor_rollout_ref.rollout.val_kwargs, 9, ())


def losses(config: RunConfig) -> LossOptions:
    return loss_options(config.actor_rollout_ref.actor)


@pytest.mark.parametrize(("overrides", "receiver", "value"), OBJECTS, ids=[row[0] for row in OBJECTS])
def test_objects_made_of_the_configuration(
    overrides: str, receiver: Callable[[RunConfig], Any], value: Any
) -> None:
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
    monkeypatch.setattr(ray_session, "_require_answer", lambda address: None)
    monkeypatch.setenv("PYTHONPATH", "")
    start_ray(load(overrides).ray_kwargs.ray_init, 1)
    assert seen[argument] == value


def test_ray_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(ray_session, "_listen_on_loopback", seen.append)
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setenv("PYTHONPATH", "")
    start_ray(load("").ray_kwargs.ray_init, 1)
    assert seen == [True]


READING = """
import pickle, sys
from verl_rc.config.load import load_run_config
from verl_rc.algorithm.ppo.choices import update_limit
from verl_rc.runtime.rollout.sampling import SamplingOptions
config = load_run_config(sys.argv[1:])
if config.data.shuffle:  # by none of the package's modules
    update_limit(pickle.loads(pickle.dumps(config.critic)))
    SamplingOptions.for_validation(pickle.loads(pickle.dumps(config.actor_rollout_ref.rollout.val_kwargs)), 9, ())
"""  # noqa: E501


def test_the_recorder_of_reads_itself(tmp_path: Path) -> None:
    """The root and a section of its own class are known where they arrive; properties read for who asks them;
    loading is none."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "recorded_reads")))
    environment = {**os.environ, "PYTHONPATH": path, "RECORDED_READS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", READING, *sound_run("gae")], env=environment, check=True)
    (file,) = tmp_path.iterdir()
    keys = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
    sampled = ("do_sample", "temperature", "top_p", "top_k")
    assert set(file.read_text().splitlines()) == {
        *(f"critic.{key} verl_rc.algorithm.ppo.choices" for key in keys),
        *(f"{V}.{key} verl_rc.runtime.rollout.sampling" for key in sampled),
    }
