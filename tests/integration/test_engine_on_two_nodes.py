"""One engine on two Ray nodes of this machine samples as on one node, and loses nothing when one of its
processes dies."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compared_runs import differences, saved_tensors
from ray._private import ray_constants
from ray.cluster_utils import Cluster
from real_runs import left_over_processes, marked_environment, metrics_of, of_folder, train
from shared_segments import nothing_left_behind
from small_runs import run_overrides, share_of_digits

pytestmark = pytest.mark.slow
STEPS = 3
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}
ON_ONE_NODE = ["trainer.nnodes=1", "trainer.n_gpus_per_node=2"]
ON_TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
GENERATE = "verl_rc.trainer.supply.supply:Supply.take"
DELIVER = "verl_rc.trainer.cluster.weight_transport:BroadcastTransport.deliver"
SECOND_NODE_DIES = ("part:2", "SIGKILL", GENERATE, "1", "0.05")
FIRST_NODE_DIES = ("engine", "SIGKILL", GENERATE, "2", "0.05")
SECOND_NODE_DIES_BEFORE_AN_UPDATE = ("part:2", "SIGKILL", DELIVER, "5", "before")
"""The update after step 2: every loss before it took one more."""


@pytest.fixture(scope="module")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two ranks and one engine of two workers, which shares their devices."""
    folder = tmp_path_factory.mktemp("reward")
    return [
        *run_overrides(task, folder),
        share_of_digits(folder),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.hang_timeout_seconds=120",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
    ]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes, whose processes find the modules of the tests."""
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**marked_environment(), **settings}.items():
            patch.setenv(name, value)
        # A Ray that an earlier test had in this process listened on 127.0.0.1 alone.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            cluster.add_node(**NODE)
            yield cluster.address
        finally:
            cluster.shutdown()
    assert not left_over_processes()


def run(overrides: list[str], folder: Path, *disturbances: str) -> None:
    result = train([*overrides, *of_folder(folder)], *disturbances)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("disturbance: ") == len(disturbances) // 5


def test_it_trains_as_on_one_node_also_when_a_process_dies(
    overrides: list[str], address: str, tmp_path: Path
) -> None:
    one, two, lost = (tmp_path / name for name in ("one", "two", "lost"))
    run([*overrides, *ON_ONE_NODE], one)
    over_nodes = [*overrides, *ON_TWO_NODES, f"ray_kwargs.ray_init.address={address}"]
    with nothing_left_behind():
        run(over_nodes, two)
    for step in range(1, STEPS + 1):
        samples = [folder / "rollouts" / f"{step}.jsonl" for folder in (one, two)]
        assert samples[0].read_bytes() == samples[1].read_bytes()
        weights = [saved_tensors(folder / f"global_step_{step}" / "actor") for folder in (one, two)]
        # Ranks have other numbers of threads.
        torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)
    deaths = [*SECOND_NODE_DIES, *FIRST_NODE_DIES, *SECOND_NODE_DIES_BEFORE_AN_UPDATE]
    with nothing_left_behind():
        run(over_nodes, lost, *deaths)
    assert differences(two, lost, STEPS) == []
    counts = metrics_of(lost)
    assert sum(counts[step].get("recovery/engines_replaced", 0) for step in range(1, STEPS + 1)) == 3
