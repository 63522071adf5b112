"""A tiny model and task on disk, and one real run (Ray, an fp32 vLLM engine, an FSDP2 rank) for a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import ROOT, make_task, run_overrides

from verl_rc.cluster.engine_group import EngineGroup
from verl_rc.cluster.ray_session import start_ray_in_background
from verl_rc.cluster.trainer_groups import ActorGroup
from verl_rc.config.load import load_run_config
from verl_rc.driver.run import Run
from verl_rc.driver.setup import open_run


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``model`` and ``data`` folders."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def faulty_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A real run whose workers can be told to go wrong. Ray is in this process while it lasts, so it ends with the module."""
    config = load_run_config(run_overrides(task, tmp_path_factory.mktemp("faulty")))
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    patch.setattr(ActorGroup, "worker", "faulty_workers:FaultyPolicyWorker")
    patch.setattr(EngineGroup, "worker", "faulty_workers:FaultyEngine")
    with open_run(config, start_ray_in_background(config.ray_kwargs.ray_init, config.num_processes)) as run:
        yield run
    patch.undo()
