"""A cluster of two Ray nodes on this machine, on which a run's places are reserved; prints what was placed
where as JSON.

A process of its own, started by tests/integration/test_two_nodes.py: other tests of a session hold a Ray of
their own.
"""

import json
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util import remove_placement_group

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RayInitConfig
from verl_rc.trainer.cluster.placement import Placement, plan_placement
from verl_rc.trainer.cluster.ray_session import start_ray
from verl_rc.trainer.cluster.remote import RemoteProcess, wait_for_all

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}
OVERRIDES = [
    "data.train_files=unused.parquet",
    "data.val_files=unused.parquet",
    "data.train_batch_size=4",
    "actor_rollout_ref.model.path=unused",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.adv_estimator=grpo",
    "trainer.device=cpu",
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "trainer.ready_timeout_seconds=600",
]

CASES = {
    "shared devices": [],
    "own devices": ["actor_rollout_ref.hybrid_engine=False"],
    "engines beside the ranks' node": [
        *("actor_rollout_ref.hybrid_engine=False", "trainer.nnodes=1", "trainer.n_gpus_per_node=2"),
    ],
    "three nodes": [
        "trainer.nnodes=3",
        "data.train_batch_size=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    ],
}


class Located:
    """Stands for a rank or an engine, and tells where it is."""

    def __init__(self, part: str) -> None:
        self.part = part

    def where(self) -> tuple[str, str, int]:
        """Part, node and process."""
        return self.part, ray.get_runtime_context().get_node_id(), os.getpid()


def locate(placement: Placement) -> list[tuple[str, str, int]]:
    """Starts a process at every place, asks where each of them is (ranks first), and gives the places
    back."""
    places = [(f"rank {index}", place) for index, place in enumerate(placement.rank_places)]
    places += [(f"engine {index}", place) for index, place in enumerate(placement.engine_places)]
    processes = [RemoteProcess(part, {}, **place.options()) for part, place in places]
    wait_for_all([p.build("two_nodes:Located", part=p.name) for p in processes], timeout_seconds=600)
    found = wait_for_all([process.call("where") for process in processes], timeout_seconds=600)
    for group in {place.group.id: place.group for _, place in places}.values():
        remove_placement_group(group)  # ends the processes in it
    return found


def place(overrides: list[str]) -> dict[str, object]:
    """Where the processes of a run would be, or why there is no run."""
    try:
        placement = plan_placement(load_run_config([*OVERRIDES, *overrides]))
    except ConfigError as error:
        return {"refused": str(error)}
    return {"one_node": placement.one_node, "found": locate(placement)}


def main() -> None:
    """All cases on one cluster, reported in one line."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        start_ray(RayInitConfig(address=cluster.address), processes=4)
        report = {name: place(overrides) for name, overrides in CASES.items()}
        report["nodes"] = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        sys.stdout.write(json.dumps(report) + "\n")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
