"""A run over two Ray nodes, each in namespaces of its own: equal to that of one node, also after a node was
lost."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compared_runs import saved_tensors
from namespaces import Network, Node, network_of
from real_runs import left_over_processes, marked_environment, metrics_of, of_folder, train
from small_runs import run_overrides, share_of_digits

pytestmark = pytest.mark.slow
STEPS = 3
SIZES = [
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.test_freq=3",
    "trainer.hang_timeout_seconds=300",
]
ON_ONE_NODE = ["trainer.nnodes=1", "trainer.n_gpus_per_node=2"]
ON_TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "ray_kwargs.ray_init.address=auto"]
PORT = "6379"


@pytest.fixture(scope="module")
def options(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two ranks and two engines, one core each."""
    reward = share_of_digits(tmp_path_factory.mktemp("reward"))
    return [*run_overrides(task, Path("nowhere")), reward, *SIZES]


@pytest.fixture(scope="module")
def one_node_run(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one node."""
    folder = tmp_path_factory.mktemp("one_node")
    result = train([*options, *ON_ONE_NODE, *of_folder(folder)])
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[Network, list[Node]]]:
    """Two nodes that form a Ray cluster."""
    with network_of(tmp_path / "nodes", 1, 2) as (network, nodes):
        start_ray(nodes[0], "--head", f"--port={PORT}", "--include-dashboard=false")
        start_ray(nodes[1], f"--address={nodes[0].address}:{PORT}")
        yield network, nodes
    assert not left_over_processes()


def on_core(number: int, *command: str) -> list[str]:
    """``command`` on one core, as if its node had no more."""
    return ["taskset", "--cpu-list", str(number), *command]


def environment_of_nodes() -> dict[str, str]:
    """One for all nodes: where it is silent, a head takes the token of ``~/.ray`` and others do not, and a
    Ray of this process kept itself to the loopback interface."""
    return marked_environment() | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}


def start_ray(node: Node, *arguments: str) -> None:
    """Start Ray on a node with one core."""
    ray = str(Path(sys.executable).parent / "ray")
    sizes = ["--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"]
    node.run(on_core(node.number - 1, ray, "start", *arguments, *sizes), environment_of_nodes())


def driver(node: Node, options: list[str], folder: Path) -> "subprocess.Popen[str]":
    """A run on the cluster, started on a node."""
    command = [sys.executable, "-m", "verl_rc.main_ppo", *options, *ON_TWO_NODES, *of_folder(folder)]
    return node.start(
        on_core(0, *command), environment_of_nodes(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def assert_equal_samples(folder: Path, expected: Path) -> None:
    """Of every step."""
    for step in range(1, STEPS + 1):
        samples = [run / "rollouts" / f"{step}.jsonl" for run in (folder, expected)]
        assert samples[0].read_text() == samples[1].read_text()


def assert_equal(folder: Path, expected: Path) -> None:
    """Samples and weights after every step, to 1e-5 of each tensor's largest weight."""
    assert_equal_samples(folder, expected)
    for step in range(1, STEPS + 1):
        found, wanted = (saved_tensors(run / f"global_step_{step}" / "actor") for run in (folder, expected))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.allclose(
                found[name], tensor, rtol=0, atol=1e-5 * max(1e-3, float(tensor.abs().max()))
            ), name


def test_two_nodes_train_as_one(
    options: list[str], one_node_run: Path, network: tuple[Network, list[Node]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = driver(network[1][0], options, folder)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output[-5000:]
    assert_equal(folder, one_node_run)


@pytest.mark.parametrize("backend", ["broadcast", "ipc"])
def test_one_engine_over_both_nodes_samples_as_two_engines(
    backend: str,
    options: list[str],
    one_node_run: Path,
    network: tuple[Network, list[Node]],
    tmp_path: Path,
) -> None:
    """With ``ipc`` each of its workers gets the weights from the rank on its node."""
    folder, section = tmp_path / "run", "actor_rollout_ref.rollout"
    both = [f"{section}.tensor_model_parallel_size=2", f"{section}.checkpoint_engine.backend={backend}"]
    run = driver(network[1][0], [*options, *both], folder)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output[-5000:]
    assert_equal_samples(folder, one_node_run)


def test_a_lost_node_ends_the_run_which_then_goes_on(
    options: list[str], one_node_run: Path, network: tuple[Network, list[Node]], tmp_path: Path
) -> None:
    (switch, nodes), folder = network, tmp_path / "run"
    run = driver(nodes[0], options, folder)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not metrics.exists() or 2 not in metrics_of(folder):
        assert run.poll() is None, run.communicate()[0][-5000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    nodes[1].cut_off()
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 1, output[-5000:]
    nodes[1] = Node(switch, 2, tmp_path / "nodes" / "again")
    start_ray(nodes[1], f"--address={nodes[0].address}:{PORT}")
    again = driver(nodes[0], options, folder)
    output, _ = again.communicate(timeout=600)
    assert again.returncode == 0, output[-5000:]
    assert "2 steps are done" in output
    assert_equal(folder, one_node_run)
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == STEPS
