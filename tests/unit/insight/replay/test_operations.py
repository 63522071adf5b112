"""Replay R8: the first operation of an engine that is farther from the trainer's than rounding makes."""

import math
from collections.abc import Sequence

import pytest

from verl_rc.insight.replay.operations import Divergence, first_divergence
from verl_rc.preflight.captured_trainer import ComparedOperation


def compared(*distances: tuple[str, float]) -> Sequence[ComparedOperation]:
    return [ComparedOperation(name, False, 3, 3, 1.0, (0, 0), distance) for name, distance in distances]


ROUNDING = compared(("embed", 1e-3), ("norm", 2e-3), ("attn", 4e-3))


def test_an_engine_that_rounds_as_the_trainer_parts_nowhere() -> None:
    engine = compared(("embed", 1e-3), ("norm", 7.9e-3), ("attn", 15.9e-3))
    assert first_divergence("norm", engine, ROUNDING) == Divergence("norm")


def test_the_first_of_the_operations_behind_a_fault_is_named() -> None:
    engine = compared(("embed", 1e-3), ("norm", 8.1e-3), ("attn", 0.5))
    assert first_divergence("embed", engine, ROUNDING) == Divergence("embed", "norm", 8.1e-3, 2e-3)


@pytest.mark.parametrize(("distance", "named"), [(0.9e-4, ""), (1.1e-4, "norm"), (math.nan, "norm")])
def test_in_float32_kernels_may_differ_by_a_little(distance: float, named: str) -> None:
    exact = compared(("embed", 0.0), ("norm", 0.0))
    assert (
        first_divergence("norm", compared(("embed", 0.0), ("norm", distance)), exact).beyond_rounding == named
    )


def test_prefill_and_decoding_have_roundings_of_their_own() -> None:
    decoding = ComparedOperation("norm", True, 3, 3, 1.0, (0, 0), 8.1e-3)
    roundings = [*ROUNDING, ComparedOperation("norm", True, 3, 3, 1.0, (0, 0), 3e-3)]
    assert first_divergence("norm", [*compared(("norm", 7e-3)), decoding], roundings) == Divergence("norm")
