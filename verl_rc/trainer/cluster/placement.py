"""Placement: the processes of a run, the cluster's resources, the placement groups, and threads per
process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_rc.config.device_checks import check_device
from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig
from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.runtime.exact import fix_summation_order
from verl_rc.runtime.workers.host import usable_cores


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group, with one device for some processes."""

    group: PlacementGroup
    bundle: int
    num_cpus: float
    """Logical CPUs of one process."""
    num_gpus: float
    """Devices that one process reserves; 0 on a CPU."""

    def options(self, reserve_gpu: bool = True) -> dict[str, Any]:
        """Ray's options for a process here; without ``reserve_gpu`` its environment variables select the
        devices."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        gpus = self.num_gpus if reserve_gpu else 0.0
        return {"scheduling_strategy": strategy, "num_cpus": self.num_cpus, "num_gpus": gpus}


@dataclass(frozen=True)
class Placement:
    """The number of processes and the resources of each."""

    device: str
    """``cpu`` or ``cuda``."""
    num_ranks: int
    num_engines: int
    trainer_threads: int
    """Threads of one trainer rank; all ranks compute at the same time while engines wait."""
    engine_threads: int
    one_node: bool
    """Whether all ranks and engines are on the same node, and connect over its loopback interface."""
    shares_devices: bool
    """Whether engines share the trainer's devices."""
    rank_places: tuple[Place, ...]
    """One place per device of the trainer; ranks of all roles with the same number are one process there."""
    engine_places: tuple[Place, ...]
    """One place per node of each engine, of its first device there; those of an engine in succession."""

    @property
    def nodes_per_engine(self) -> int:
        """Nodes of one engine."""
        return len(self.engine_places) // self.num_engines

    def ranks_beside(self, place: int) -> range:
        """The trainer ranks whose devices an engine shares on the node of one of ``engine_places``."""
        devices = self.num_ranks // len(self.engine_places)
        return range(place * devices, (place + 1) * devices)


def plan_placement(config: RunConfig) -> Placement:
    """Decide the processes of a run on the connected cluster, and how sums are added in them, and reserve
    their places.

    Raises ``ConfigError`` when there are fewer devices than asked for (GPUs on a GPU cluster, cores on a CPU)
    or engines cannot work so on them, and ``RemoteError`` when the places do not become free within
    ``trainer.ready_timeout_seconds``.
    """
    trainer = config.trainer
    total = ray.cluster_resources()
    device = trainer.device if trainer.device != "auto" else ("cuda" if total.get("GPU", 0) else "cpu")
    _check_nodes(config, device)
    if problems := list(check_device(config, device)):
        raise ConfigError("\n".join(problems))
    if device == "cpu":
        _check_cores(config)
    if config.actor_rollout_ref.exact:
        fix_summation_order(device)
    trainer_threads, engine_threads = _threads(config, device)
    rank_places, engine_places = _reserve(
        config, device, min(1.0, total.get("CPU", 1.0) / config.num_processes)
    )
    return Placement(
        device=device,
        num_ranks=config.num_ranks,
        num_engines=config.num_engines,
        trainer_threads=trainer_threads,
        engine_threads=engine_threads,
        one_node=_are_on_one_node([*rank_places, *engine_places]),
        shares_devices=config.actor_rollout_ref.hybrid_engine,
        rank_places=tuple(rank_places),
        engine_places=tuple(engine_places),
    )


def _threads(config: RunConfig, device: str) -> tuple[int, int]:
    """Threads of a trainer rank and of an engine's worker: all cores where they take turns, else a share of
    the cores each."""
    cores = usable_cores()
    ranks, workers = config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n_gpus_per_node
    if device == "cpu" and config.overlaps:
        share = max(1, cores // (ranks + workers))
        return share, share
    return max(1, cores // ranks), max(1, cores // workers)


def _check_nodes(config: RunConfig, device: str) -> None:
    """Raise ``ConfigError`` unless there are enough nodes, each with enough GPUs."""
    rollout = config.actor_rollout_ref.rollout
    own_pool = not config.actor_rollout_ref.hybrid_engine
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    connect = "" if config.ray_kwargs.ray_init.address else f" and pass {_CONNECT}"
    if len(nodes) < config.trainer.nnodes:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} nodes are needed, the cluster has {len(nodes)}. Lower "
            f"trainer.nnodes, or start Ray on the missing ones{connect} (docs/cluster.md)."
        )
    if device == "cpu":
        return
    if not own_pool and rollout.checkpoint_engine.backend == "broadcast":
        raise ConfigError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast cannot connect trainer and "
            "engines that share GPUs (hybrid_engine=True): NCCL refuses two processes on one GPU. Pass "
            "backend=auto."
        )
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    needs = _GpusPerNode.from_config(config)
    if not needs.fit(gpus):
        raise ConfigError(
            f"trainer.nnodes x trainer.n_gpus_per_node = {config.num_ranks} GPUs are needed"
            f"{needs.beside_ranks()}, {max(needs.ranks, needs.engines)} on a node; the cluster has "
            f"{sum(gpus)} on {len(nodes)} nodes{_largest_share(gpus, config.trainer.nnodes)}. "
            f"{_what_fits(config, needs, gpus)}"
        )
    size, devices = rollout.devices_of_an_engine_per_node, config.num_engine_devices
    room = {
        count: sum(num_gpus // count for num_gpus in gpus)
        for count in range(1, size + 1)
        if devices % count == 0
    }
    if devices // size > room[size]:
        largest = max(count for count, places in room.items() if places >= devices // count)
        raise ConfigError(
            f"engines need {devices // size} places of {size} GPUs on one node, because "
            "actor_rollout_ref.rollout.tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size}; the cluster's nodes have {room[size]}. Pass {largest}."
        )


_CONNECT = "ray_kwargs.ray_init.address=auto"


@dataclass(frozen=True)
class _GpusPerNode:
    """The GPUs that a run asks for."""

    nodes: int
    ranks: int
    """GPUs of trainer ranks on each node."""
    engine_nodes: int
    engines: int
    """GPUs of engines on each of their nodes. 0 means that engines share those of the ranks."""
    reward_model: int
    """GPUs of the reward model, on one node."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "_GpusPerNode":
        trainer, rollout, reward_model = (
            config.trainer,
            config.actor_rollout_ref.rollout,
            config.reward.reward_model,
        )
        engine_gpus = 0 if config.actor_rollout_ref.hybrid_engine else rollout.n_gpus_per_node
        reward_gpus = reward_model.n_gpus_per_node if reward_model.enable else 0
        return cls(trainer.nnodes, trainer.n_gpus_per_node, rollout.nnodes, engine_gpus, reward_gpus)

    def fit(self, gpus: Sequence[int]) -> bool:
        """Whether nodes with these numbers of GPUs have enough."""
        needed = self.nodes * self.ranks + self.engine_nodes * self.engines + self.reward_model
        large_enough = sum(count >= max(self.ranks, self.engines) for count in gpus)
        return needed <= sum(gpus) and large_enough >= self.nodes and self.reward_model <= max(gpus)

    def beside_ranks(self) -> str:
        """The GPUs needed beside those of ranks, as a part of a message."""
        engines = f" and {self.engine_nodes * self.engines} for engines" if self.engines else ""
        return engines + (f" and {self.reward_model} for the reward model" if self.reward_model else "")


def _what_fits(config: RunConfig, needs: _GpusPerNode, gpus: Sequence[int]) -> str:
    """A sentence with the keys that would fit the cluster; parts of the number asked for keep batches
    divisible."""
    ways = [] if config.ray_kwargs.ray_init.address else [f"{_CONNECT} where a cluster of more nodes runs"]
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    for part in range(2, needs.ranks + 1):
        smaller = replace(needs, ranks=needs.ranks // part, engines=needs.engines // part)
        divides = needs.ranks % part == needs.engines % part == 0
        devices = smaller.engine_nodes * smaller.engines or smaller.nodes * smaller.ranks
        if divides and devices % size == 0 and smaller.fit(gpus):
            engine_key = (
                f" actor_rollout_ref.rollout.n_gpus_per_node={smaller.engines}" if smaller.engines else ""
            )
            ways.append(f"trainer.n_gpus_per_node={smaller.ranks}{engine_key}")
            break
    return f"Pass {', or '.join([*ways, 'trainer.device=cpu to train on the CPU'])}."


def _largest_share(gpus: Sequence[int], nodes: int) -> str:
    """The number of GPUs that each of the ``nodes`` largest has, for a message; empty when one has none."""
    share = sorted(gpus, reverse=True)[nodes - 1]
    return f", {share} on each of the {nodes} largest" if share else ""


def _check_cores(config: RunConfig) -> None:
    """Raise ``ConfigError`` unless each rank and each engine has a core: ranks compute at the same time, and
    so do engines."""
    trainer = config.trainer
    cores = usable_cores()
    if max(trainer.n_gpus_per_node, config.num_engine_devices // trainer.nnodes) > cores:
        raise ConfigError(
            "on a CPU every trainer rank and every engine needs a core of its own: "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} and {config.num_engines} engines were asked "
            f"for, this process may use {cores}. Pass trainer.n_gpus_per_node=1 (on a CPU it means trainer "
            "ranks)."
        )
    options = config.async_training
    engines = config.num_engine_devices // trainer.nnodes
    if config.overlaps and trainer.n_gpus_per_node + engines > cores:
        synchronous = (
            "staleness_threshold=0"
            if options.trigger_parameter_sync_step == 1
            else "trigger_parameter_sync_step=1"
        )
        raise ConfigError(
            f"with async_training.staleness_threshold={options.staleness_threshold:g} trainer ranks and "
            f"engines compute at the same time, each on a core of its own: {trainer.n_gpus_per_node} ranks "
            f"and {engines} engines were asked for, this process may use {cores}. Ask for fewer, or pass "
            f"async_training.{synchronous}."
        )


def _reserve(config: RunConfig, device: str, cpus: float) -> tuple[list[Place], list[Place]]:
    """Reserve the places of ranks and engines; engines that do not share the trainer's devices get separate
    ones."""
    per_place = config.actor_rollout_ref.rollout.devices_of_an_engine_per_node
    shared = config.actor_rollout_ref.hybrid_engine
    gpu = 1.0 if device == "cuda" else 0.0
    # A local Ray has just as many CPUs as the run has processes.
    bundles = [
        {"CPU": cpus * (1 + (shared and index % per_place == 0)), "GPU": gpu}
        for index in range(config.trainer.n_gpus_per_node)
    ]
    groups = [_group(bundles) for _ in range(config.trainer.nnodes)]
    rank_places = [
        Place(group, bundle, cpus, gpu)
        for group in groups
        for bundle in range(config.trainer.n_gpus_per_node)
    ]
    if shared:
        engine_places = rank_places[::per_place]
    else:
        bundle, count = {"CPU": cpus, "GPU": gpu * per_place}, config.num_engine_devices // per_place
        engine_groups = [_group([bundle]) for _ in range(count)]
        engine_places = [Place(group, 0, cpus, gpu * per_place) for group in engine_groups]
        groups += engine_groups
    _wait_until_free(groups, config.trainer.ready_timeout_seconds)
    return rank_places, engine_places


def _are_on_one_node(places: Sequence[Place]) -> bool:
    """Whether all places are on one node; engines with separate devices may be on another node than ranks."""
    groups = {place.group.id: place.group for place in places}.values()
    return (
        len(
            {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
        )
        <= 1
    )


def _group(bundles: Sequence[dict[str, float]]) -> PlacementGroup:
    """Bundles on one node."""
    resources = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    return placement_group(resources, strategy="STRICT_PACK")


def _wait_until_free(groups: list[PlacementGroup], timeout_seconds: float) -> None:
    waiting = [group.ready() for group in groups]
    _, unavailable = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_seconds)
    if unavailable:
        raise RemoteError(
            f"{len(unavailable)} of {len(waiting)} groups of processes found no free place within "
            f"{timeout_seconds:.0f} s. The cluster has {_shown(ray.cluster_resources())} and "
            f"{_shown(ray.available_resources())} free: other jobs hold the rest. Stop them, ask for less, "
            "or raise trainer.ready_timeout_seconds."
        )


def _shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
