"""fp8 on a CPU: the fastest implementation of its matrix products, by measurement, and support of an fp8 KV
cache.

vLLM's fp8 linear layers call ``torch._scaled_mm`` on a CPU. PyTorch 2.13 passes that call to oneDNN on every
CPU with AMX int8, but oneDNN has an fp8 kernel only for AMX fp16; otherwise it runs its reference
implementation, thousands of times slower. On CPUs without AMX, PyTorch emulates the product: both matrices in
float32, one float32 product. Its third implementation, scaling by rows, is not used: it is at most twice as
fast as the emulation. The name of a CPU does not say which implementation it has.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import inf, isfinite

import torch
from torch import Tensor

SLOWEST_RATIO = 20.0
"""Largest time of an fp8 product over that of a bf16 product."""
_MIN_SPEEDUP = 3.0
"""PyTorch's choice stands unless another implementation is this many times faster: numbers must not depend
on a noisy measurement."""
_ROWS, _INNER, _COLUMNS = 128, 128, 256
"""Large enough to distinguish the implementations; 0.8 s in oneDNN's reference implementation."""
_REPETITIONS = 20
_MAX_SECONDS = 1.0

IMPLEMENTATIONS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "PyTorch's choice": nullcontext,
    "PyTorch's emulation": partial(torch.backends.mkldnn.flags, enabled=False),
}
"""Contexts in which ``torch._scaled_mm`` computes; the first is preferred."""


class SlowFp8Error(ValueError):
    """No implementation of fp8 products is fast enough on this CPU."""

    must = f"an fp8 product must take at most {SLOWEST_RATIO:.0f} times as long as a bf16 product on this CPU"
    remedy = (
        "pass actor_rollout_ref.rollout.quantization=null: an engine in bf16 differs from a float32 trainer, "
        "too"
    )


class NoFp8CacheError(ValueError):
    """vLLM has no attention over a cache in fp8 on this CPU."""


@dataclass(frozen=True)
class Fp8Timings:
    """Times of one small product, milliseconds."""

    bf16: float
    """Time of a product of bf16 matrices."""
    fp8: Mapping[str, float]
    """Times of a product of fp8 matrices, by names of ``IMPLEMENTATIONS``; infinite where the CPU lacks the
    implementation."""

    @property
    def implementation(self) -> str:
        """The implementation to use. Raises ``SlowFp8Error`` when none is fast enough."""
        fastest = min(self.fp8.values())
        if fastest > SLOWEST_RATIO * self.bf16:
            raise SlowFp8Error(f"{SlowFp8Error.must}, got {self.times()}; {SlowFp8Error.remedy}.")
        return next(name for name, milliseconds in self.fp8.items() if milliseconds <= _MIN_SPEEDUP * fastest)

    def describe(self) -> str:
        """The chosen implementation and its times, as text."""
        return f"{self.implementation} ({self.times()})"

    def times(self) -> str:
        """The times as text."""
        shape = f"{_ROWS} x {_INNER} x {_COLUMNS}"
        times = {**self.fp8, "bf16": self.bf16}
        entries = (
            f"{name} {f'{time:.2f} ms' if isfinite(time) else 'impossible'}" for name, time in times.items()
        )
        return f"{shape} product: {', '.join(entries)}"


@cache
def time_fp8_products() -> Fp8Timings:
    """Time each implementation once per process, with the process's threads."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(_ROWS, _INNER, generator=generator, dtype=torch.float32)
    # float32 by name: while vLLM builds a model, its precision is the default dtype.
    right = torch.randn(_COLUMNS, _INNER, generator=generator, dtype=torch.float32)
    left_bf16, right_bf16 = left.bfloat16(), right.bfloat16()
    bf16 = _milliseconds(lambda: left_bf16 @ right_bf16.t())
    left_fp8, right_fp8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    times = {}
    for name, context in IMPLEMENTATIONS.items():
        with context():
            times[name] = _milliseconds(lambda: _product(left_fp8, right_fp8))
    return Fp8Timings(bf16, times)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Compute the product as vLLM's ``ChannelWiseTorchFP8ScaledMMLinearKernel`` calls it."""
    scale = torch.ones(1, dtype=torch.float32)  # while vLLM builds a model, its precision is the default
    return torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)


def _milliseconds(compute: Callable[[], Tensor]) -> float:
    """The shortest of some calls, which other programs disturb least; infinite when the call fails."""
    shortest, first_start = inf, time.perf_counter()
    try:
        for repetition in range(_REPETITIONS):
            start = time.perf_counter()
            compute()
            end = time.perf_counter()
            shortest = min(shortest, end - start)
            # One repetition at least: the first call includes what oneDNN compiles.
            if repetition and end - first_start > _MAX_SECONDS:
                break
    except RuntimeError:  # oneDNN: "could not create a primitive descriptor"
        return inf
    return 1e3 * shortest


def require_fp8_cache() -> None:
    """Raise ``NoFp8CacheError`` unless vLLM has attention over a cache in fp8 on this CPU."""
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        raise NoFp8CacheError(
            "a key-value cache in fp8 needs a CPU with AVX-512 or AMX, which this one does not have; pass "
            "actor_rollout_ref.rollout.kv_cache_dtype=auto."
        )
