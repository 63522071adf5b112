"""A tiny model and task on disk, one Ray for small processes, and one real run (Ray, an fp32 vLLM engine, an FSDP2 rank)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from listening_sockets import family, listening
from real_steps import RealRun, open_faulty_run
from small_runs import ROOT, make_task

from verl_rc.cluster.ray_session import start_ray
from verl_rc.config.trainer import RayInitConfig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process holds one Ray at a time, and starting one takes seconds: tests that share one run in succession, and last."""

    def turn(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return 2 if "faulty_run" in names else int("ray_here" in names)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``model`` and ``data`` folders."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def ray_here() -> Iterator[set[tuple[str, str]]]:
    """A Ray in this process, with room for three processes; its value are the sockets that listened here before.

    Its first start fails when its servers are up, as on a machine that is too busy.
    """
    import ray
    from ray._private import services

    before = listening(family(str(os.getpid())))
    get_node, failures = services.get_node, [Exception("The current node timed out during startup.")]

    def fails_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return get_node(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
        patch.setattr(services, "get_node", fails_once)
        start_ray(RayInitConfig(), processes=3)
        assert not failures
        yield before
        ray.shutdown()


@pytest.fixture(scope="session")
def faulty_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A real run whose workers can be told to go wrong; each test leaves it healthy."""
    import ray

    ray.shutdown()  # that of ``ray_here``
    with open_faulty_run(task, tmp_path_factory.mktemp("faulty")) as run:
        yield run
