"""Tests that run twice: tensor by tensor, and in compiled loops."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["tensors", "compiled"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[str]:
    """Small batches, too, are swept in compiled loops wherever those apply; or none is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_rc.correction.sweep.SMALLEST_PASS", 0 if request.param == "compiled" else 1 << 60)
        yield request.param
