"""What tests of the loop have in common."""

import pytest
from formula_run import without_processes


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs in this process, with worlds of ``formula_run`` for engines and ranks."""
    without_processes(monkeypatch)
