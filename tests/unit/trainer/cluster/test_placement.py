"""A placement that the cluster can never give fails at once, before anything is reserved; Ray is a table."""

from pathlib import Path
from typing import Any

import pytest
import ray
from small_models import small_run_config

from verl_rc.config.errors import ConfigError
from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.trainer.cluster import placement
from verl_rc.trainer.cluster.placement import plan_placement

ROLLOUT = "actor_rollout_ref.rollout"
SIZES = ("data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=12")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """One node with these resources; nothing may be reserved."""
    resources = {"CPU": 4.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: pytest.fail("something was reserved"))
    return resources


def test_too_few_gpus(cluster: dict[str, float], tmp_path: Path) -> None:
    cluster["GPU"] = 1.0
    config = small_run_config(tmp_path, "trainer.device=cuda", "trainer.n_gpus_per_node=2")
    with pytest.raises(ConfigError, match=r"2 GPUs are needed.* the cluster has 1 on 1 nodes"):
        plan_placement(config)


def test_more_ranks_than_a_node_has_gpus(
    cluster: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: with the number that fits."""
    cluster["GPU"] = 14.0
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": gpus}} for gpus in (4.0, 6.0, 4.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    config = small_run_config(
        tmp_path, "trainer.device=cuda", "trainer.n_gpus_per_node=6", "trainer.nnodes=2", *SIZES
    )
    with pytest.raises(
        ConfigError, match=r"6 on a node; the cluster has 14 on 3 nodes, 4 on each of the 2 largest"
    ):
        plan_placement(config)


def test_engines_that_no_node_has_room_for(
    cluster: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: three engines of four GPUs do not fit on two nodes of six beside each other."""
    cluster["GPU"] = 13.0
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": gpus}} for gpus in (6.0, 6.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    own = ("actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=6")
    config = small_run_config(
        tmp_path, "trainer.device=cuda", *own, f"{ROLLOUT}.tensor_model_parallel_size=4"
    )
    with pytest.raises(
        ConfigError, match=r"3 places of 4 GPUs .*tensor_model_parallel_size=4; .* nodes have 2\. Pass 3\."
    ):
        plan_placement(config)


def test_shared_gpus_and_a_broadcast(cluster: dict[str, float], tmp_path: Path) -> None:
    """B6: NCCL would refuse it when the first weights are sent."""
    cluster["GPU"] = 8.0
    backend = "actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast"
    with pytest.raises(ConfigError, match="NCCL refuses two processes on one GPU"):
        plan_placement(small_run_config(tmp_path, "trainer.device=cuda", backend))


def test_the_gpus_of_a_reward_model_are_counted(cluster: dict[str, float], tmp_path: Path) -> None:
    """B6: it would wait for them until the time to become ready is over."""
    cluster["GPU"] = 2.0
    judge = (
        "reward.reward_model.enable=True",
        "reward.reward_model.model_path=judge",
        "reward.reward_model.n_gpus_per_node=1",
    )
    with pytest.raises(ConfigError, match=r"= 2 GPUs are needed and 1 for the reward model, .* has 2"):
        plan_placement(small_run_config(tmp_path, "trainer.device=cuda", "trainer.n_gpus_per_node=2", *judge))


def test_an_engine_of_a_reward_model_has_gpus_of_its_own(
    cluster: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device ``auto`` is judged as the one that is found."""
    cluster["GPU"] = 2.0
    served = ("enable=True", "model_path=judge", "rollout.name=vllm")
    judge = [f"reward.reward_model.{override}" for override in served]
    given = ("trainer.device=auto", "trainer.n_gpus_per_node=2", *judge)
    with pytest.raises(ConfigError, match=r"pass reward.reward_model.n_gpus_per_node=1\."):
        plan_placement(small_run_config(tmp_path, *given))
    with pytest.raises(ConfigError, match=r"= 2 GPUs are needed and 1 for the reward model, .* has 2"):
        plan_placement(small_run_config(tmp_path, *given, "reward.reward_model.n_gpus_per_node=1"))
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}] * 3
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    two = ("rollout.tensor_model_parallel_size=2", "n_gpus_per_node=2")  # which no node has
    spread = [f"reward.reward_model.{override}" for override in two]
    with pytest.raises(ConfigError, match=r"= 1 GPUs are needed and 2 for the reward model, .* has 3"):
        plan_placement(small_run_config(tmp_path, "trainer.device=cuda", *judge, *spread))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_long_sequences_in_float32_on_a_gpu(device: str, cluster: dict[str, float], tmp_path: Path) -> None:
    """E3: no fused kernel takes them, and all attention scores would be kept."""
    cluster["GPU"] = 1.0
    given = (
        f"trainer.device={device}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "data.max_prompt_length=2000",
    )
    must = (
        r"at most 2,048 tokens.* is 2,049. Pass actor_rollout_ref.actor.fsdp_config.dtype=bfloat16, or lower"
    )
    with pytest.raises(ConfigError, match=must):
        plan_placement(small_run_config(tmp_path, *given, "data.max_response_length=49"))
    with pytest.raises(pytest.fail.Exception, match="something was reserved"):
        plan_placement(small_run_config(tmp_path, *given, "data.max_response_length=48"))


@pytest.mark.usefixtures("cluster")
def test_too_few_nodes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.nnodes=2 nodes are needed, the cluster has 1"):
        plan_placement(small_run_config(tmp_path, "trainer.nnodes=2"))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_quantization_that_no_cpu_has(device: str, tmp_path: Path) -> None:
    """With ``auto`` the device is known only now."""
    with pytest.raises(
        ConfigError, match=r"rollout.quantization=fp8 cannot be used on a CPU: .* use fp8_per_channel"
    ):
        plan_placement(
            small_run_config(
                tmp_path, f"trainer.device={device}", "actor_rollout_ref.rollout.quantization=fp8"
            )
        )


@pytest.mark.usefixtures("cluster")
def test_too_few_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: 1)
    with pytest.raises(ConfigError, match="this process may use 1"):
        plan_placement(small_run_config(tmp_path, "trainer.n_gpus_per_node=2"))


@pytest.mark.usefixtures("cluster")
def test_what_works_at_the_same_time_needs_cores_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ["async_training.staleness_threshold=1", "async_training.partial_rollout=False"]
    own = "actor_rollout_ref.hybrid_engine=False"
    config = small_run_config(tmp_path, *whole, own, "algorithm.rollout_correction.preset=disabled")
    monkeypatch.setattr(placement, "usable_cores", lambda: 1)
    with pytest.raises(ConfigError, match="1 ranks and 1 engines were asked for, this process may use 1"):
        plan_placement(config)
    monkeypatch.setattr(placement, "usable_cores", lambda: 8)
    assert placement._threads(config, "cpu") == (4, 4)
    assert (
        placement._threads(config, "cuda") == placement._threads(small_run_config(tmp_path), "cpu") == (8, 8)
    )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("hybrid", "threads"), [(True, (8, 8)), (False, (4, 4))])
def test_steps_between_publications_overlap_with_sampling_on_devices_of_their_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hybrid: bool, threads: tuple[int, int]
) -> None:
    several = ["async_training.trigger_parameter_sync_step=2", "algorithm.rollout_correction.preset=disabled"]
    config = small_run_config(tmp_path, *several, f"actor_rollout_ref.hybrid_engine={hybrid}")
    monkeypatch.setattr(placement, "usable_cores", lambda: 8)
    assert placement._threads(config, "cpu") == threads
    assert config.overlaps is not hybrid
    monkeypatch.setattr(placement, "usable_cores", lambda: 1)
    if not hybrid:
        with pytest.raises(ConfigError, match=r"pass async_training\.trigger_parameter_sync_step=1"):
            plan_placement(config)


@pytest.mark.usefixtures("cluster")
def test_places_that_others_hold_are_waited_for_as_long_as_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    class Group:
        def ready(self) -> "Group":
            return self

    def wait(groups: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        return [], groups

    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(
        RemoteError, match=r"found no free place within 7 s.*1 CPU.*trainer.ready_timeout_seconds"
    ):
        plan_placement(small_run_config(tmp_path, "trainer.ready_timeout_seconds=7"))
    assert waited == [7.0]


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bundles of every group; four nodes have them all."""
    groups: list[Any] = []
    nodes = [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}} for _ in range(4)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 256.0, "GPU": 32.0})
    monkeypatch.setattr(placement, "_wait_until_free", lambda *_: None)
    monkeypatch.setattr(placement, "_are_on_one_node", lambda _: False)

    def reserve(bundles: list[dict[str, float]], strategy: str) -> int:
        assert strategy == "STRICT_PACK"
        groups.append(bundles)
        return len(groups) - 1

    monkeypatch.setattr(placement, "placement_group", reserve)
    return groups


NODES = ("trainer.device=cuda", "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32")


def test_an_engine_of_sixteen_gpus_is_beside_the_ranks_of_two_nodes(
    reserved: list[Any], tmp_path: Path
) -> None:
    sizes = ("trainer.nnodes=4", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=16")
    planned = plan_placement(small_run_config(tmp_path, *NODES, *sizes))
    assert (planned.num_engines, planned.nodes_per_engine) == (2, 2)
    assert [(place.group, place.bundle) for place in planned.engine_places] == [
        (node, 0) for node in range(4)
    ]
    assert [[*planned.ranks_beside(place)] for place in (1, 2)] == [[*range(8, 16)], [*range(16, 24)]]
    # A process of ranks on each device, and one of engines on each node.
    assert reserved == [[{"CPU": 2.0, "GPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 7]] * 4


def test_an_engine_of_sixteen_gpus_of_its_own_has_a_group_for_each_node(
    reserved: list[Any], tmp_path: Path
) -> None:
    own = ("actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=8")
    sizes = ("trainer.nnodes=1", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=16")
    planned = plan_placement(small_run_config(tmp_path, *NODES, *own, *sizes))
    assert [(place.group, place.num_gpus) for place in planned.engine_places] == [(1, 8.0), (2, 8.0)]
    assert reserved[1:] == [[{"CPU": 1.0, "GPU": 8.0}]] * 2


def test_places_take_as_many_cpus_as_a_local_ray_has(
    reserved: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run_config(
        tmp_path, *NODES, "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=4"
    )
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(config.num_processes), "GPU": 8.0})
    plan_placement(config)
    assert sum(bundle["CPU"] for bundles in reserved for bundle in bundles) == config.num_processes == 10
