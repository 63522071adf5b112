"""The compiled loops where tensor code has a function of its own to compare with."""

import importlib
import math

import numpy as np
import pytest
import torch

from verl_rc.correction import token_loops
from verl_rc.correction.histogram import LARGEST, NUM_BINS, SMALLEST, log_ratio_histogram


def python(function: object) -> object:
    """What a compiled function is made from."""
    return function.py_func


def test_expm1_to_the_last_bits() -> None:
    expm1 = python(token_loops._expm1)
    tiny = [sign * 10.0**exponent for exponent in range(-300, 0, 7) for sign in (1, -1)]
    for x in [*np.linspace(-20.0, 20.0, 4001).tolist(), *tiny]:
        assert expm1(x) == pytest.approx(math.expm1(x), rel=1e-14, abs=0.0), x


def test_bins_are_those_of_the_tensor_code() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-9, 2, 5000, dtype=torch.float64).float()
    edges = torch.tensor([0.0, SMALLEST, LARGEST, 1e30, *(2.0**k for k in range(-24, 5))])
    values = torch.cat([sizes, -sizes, edges, -edges, torch.randn(5000, generator=generator)])
    counts = np.zeros(NUM_BINS, np.int64)
    python(token_loops._count_bins)(values.numpy().view(np.int32), counts)
    assert counts.tolist() == log_ratio_histogram(values, torch.ones_like(values)).tolist()


@pytest.mark.parametrize(("floats", "integers"), [(np.float32, np.int32), (np.float64, np.int64)])
@pytest.mark.parametrize("values", [[1.5, -2.25, 0.0, -7.5], [-3.0, -1e-30, -5e8, -4.0], [0.25, 3e-40, 7.0, -0.0]])
def test_extremes_of_valid_tokens(values: list[float], floats: type, integers: type) -> None:
    given, ones = np.array([99.0, *values, -99.0], floats), np.array([0, 1, 1, 1, 1, 0], np.float32)
    found = python(token_loops._extremes)(given, given.view(integers), ones)
    assert found == (floats(max(values)), -floats(min(values)))


def test_turns() -> None:
    buckets = np.full(14, 9, np.uint8)
    python(token_loops._turns)(np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1], np.uint8), buckets)
    assert buckets[[1, 2, 4, 7, 9, 11, 13]].tolist() == [0, 0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("error", [EOFError("Ran out of input"), OSError("No space left on device")])
def test_machine_code_that_cannot_be_kept_is_made_anew(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(cache: bool = False, **_: object) -> object:
        def fail(*_: object) -> None:
            raise error

        return lambda function: fail if cache else function

    monkeypatch.setattr("verl_rc.correction.token_loops.numba.njit", njit)
    seen: list[int] = []
    compiled = token_loops._compiled_for_python(seen.append)
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR"):
        compiled(3)
    assert seen == [3]


def test_without_a_folder_to_write_to_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(cache: bool = False, **_: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr("verl_rc.correction.token_loops.numba.njit", njit)
    assert token_loops._compiled_for_python(math.sqrt) is math.sqrt


def test_a_constant_changed_elsewhere_is_found_before_old_machine_code_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_rc.correction.log_ratio.SAFETY_BOUND", 10.0)
    with pytest.raises(RuntimeError, match="change it with them"):
        importlib.reload(token_loops)
    monkeypatch.undo()
    importlib.reload(token_loops)
