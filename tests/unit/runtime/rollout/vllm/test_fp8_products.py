"""Which way of computing fp8 products is taken, and that all ways compute the same."""

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rc.runtime.rollout.vllm import fp8_products
from verl_rc.runtime.rollout.vllm.fp8_products import (
    IMPLEMENTATIONS,
    Fp8Timings,
    SlowFp8Error,
    require_fp8_cache,
    time_fp8_products,
)

CHOICE, EMULATION = IMPLEMENTATIONS


@pytest.mark.parametrize(
    ("bf16", "choice", "emulation", "taken"),
    [
        (0.3, 2.0, 2.0, CHOICE),
        (0.3, 4.0, 2.0, CHOICE),  # may be noise
        (0.3, 0.5, 2.0, CHOICE),
        (0.3, 4520.0, 2.0, EMULATION),  # AMX int8 without AMX fp16
        (0.3, inf, 2.0, EMULATION),  # oneDNN told to use less than AMX
        (9.0, 170.0, 500.0, CHOICE),
    ],
)
def test_the_way_taken(bf16: float, choice: float, emulation: float, taken: str) -> None:
    products = Fp8Timings(bf16, {CHOICE: choice, EMULATION: emulation})
    assert products.implementation == taken
    assert products.describe().startswith(f"{taken} (")


def test_a_cpu_without_a_fast_way_is_refused() -> None:
    with pytest.raises(
        SlowFp8Error, match=r"at most 20 times.*4520.00 ms, .*impossible, bf16 0.30 ms.*quantization=null"
    ):
        _ = Fp8Timings(0.3, {CHOICE: 4520.0, EMULATION: inf}).implementation
    with pytest.raises(SlowFp8Error):
        _ = Fp8Timings(0.1, {CHOICE: 2.1, EMULATION: 2.1}).implementation


def test_every_way_computes_the_same_to_the_last_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, 48, generator=generator).to(torch.float8_e4m3fn) for size in (5, 7))
    exact = left.double() @ right.double().t()
    for context in IMPLEMENTATIONS.values():
        with context():
            torch.testing.assert_close(
                fp8_products._product(left, right).double(), exact, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("fault", ["slow", "refused"])
def test_what_onednn_cannot_do_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch._scaled_mm, 0

    def without_kernel(*matrices: Tensor, **arguments: Any) -> Tensor:
        nonlocal calls
        if torch._C._get_mkldnn_enabled():
            calls += 1
            if fault == "refused":
                raise RuntimeError("could not create a primitive descriptor")
            torch.cumsum(torch.ones(1 << 24), 0)  # some 20 ms or more, on any load in proportion
        return real(*matrices, **arguments)

    monkeypatch.setattr(torch, "_scaled_mm", without_kernel)
    products = time_fp8_products.__wrapped__()
    assert products.implementation == EMULATION
    assert calls >= 1


@pytest.mark.parametrize(("has_avx512", "has_amx"), [(False, False), (True, False), (False, True)])
def test_a_cache_in_fp8_needs_wide_vectors(
    has_avx512: bool, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's attention on a CPU does, which would end in a traceback."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    if has_avx512 or has_amx:
        require_fp8_cache()
    else:
        with pytest.raises(
            ValueError, match=r"needs a CPU with AVX-512 or AMX, .*; pass .*kv_cache_dtype=auto"
        ):
            require_fp8_cache()
