"""A tiny model and task on disk, and one real run (Ray, an fp32 vLLM engine, an FSDP2 rank) for a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_steps import RealRun, open_faulty_run
from small_runs import make_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``model`` and ``data`` folders."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def faulty_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A real run whose workers can be told to go wrong. Ray is in this process while it lasts, so it ends with the module."""
    with open_faulty_run(task, tmp_path_factory.mktemp("faulty")) as run:
        yield run
