"""The small model, written once."""

from pathlib import Path

import pytest
from small_models import write_small_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))
