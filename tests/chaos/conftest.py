"""The small model and task of the integration tests."""

from pathlib import Path

import pytest
from small_runs import make_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_task(tmp_path_factory.mktemp("task"))
