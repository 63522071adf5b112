"""Which processes a run needs, whether the cluster can hold them, and how many threads each may use."""

import os
from dataclasses import dataclass

import ray

from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig


@dataclass(frozen=True)
class Placement:
    """Numbers of processes and what each gets."""

    device: str
    """``cpu`` or ``cuda``."""
    num_ranks: int
    num_engines: int
    trainer_threads: int
    """Threads of one trainer rank; ranks compute together, engines wait meanwhile."""
    engine_threads: int
    one_node: bool


def plan_placement(config: RunConfig) -> Placement:
    """Decide the processes of a run on the connected cluster.

    Raises ``ConfigError`` when there are fewer devices than asked for: GPUs on a GPU cluster, cores on a CPU (one per
    rank).
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    gpus = int(ray.cluster_resources().get("GPU", 0))
    device = trainer.device if trainer.device != "auto" else ("cuda" if gpus else "cpu")
    num_ranks, num_engines = config.num_ranks, config.num_engines
    if device == "cuda" and gpus < num_ranks:
        raise ConfigError(
            f"trainer.nnodes x trainer.n_gpus_per_node = {num_ranks} GPUs are needed, the cluster has {gpus}. "
            "Lower trainer.n_gpus_per_node, or pass trainer.device=cpu to train on the CPU."
        )
    cores = os.cpu_count() or 1
    if device == "cpu" and max(trainer.n_gpus_per_node, config.num_engine_devices // trainer.nnodes) > cores:
        raise ConfigError(
            "on a CPU every trainer rank and every engine needs a core of its own: trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node} and {num_engines} engines were asked for, this machine has {cores} cores. "
            f"Pass trainer.n_gpus_per_node={min(cores, 1)} (on a CPU it means trainer ranks)."
        )
    engines_per_node = max(1, num_engines // (rollout.nnodes or trainer.nnodes))
    return Placement(
        device=device,
        num_ranks=num_ranks,
        num_engines=num_engines,
        trainer_threads=max(1, cores // trainer.n_gpus_per_node),
        engine_threads=max(1, cores // (engines_per_node * rollout.tensor_model_parallel_size)),
        one_node=trainer.nnodes == 1,
    )
