"""What fp8 can do on a CPU: which implementation of its products is fast here, measured; and whether a cache
in it works.

vLLM's fp8 linear layers end in ``torch._scaled_mm`` on a CPU. PyTorch 2.13 gives that call to oneDNN on every
CPU with AMX int8, but oneDNN has an fp8 kernel only from AMX fp16 on; without one it runs its reference
implementation, thousands of times slower. PyTorch's own emulation (both matrices in float32, one float32
product) is what CPUs without AMX get; it is within a factor of two of scaling by rows, PyTorch's third way,
which therefore is not used. A CPU's name does not tell which of these it has.
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
"""How many times longer than a product of bf16 matrices an fp8 product may take."""
_PREFERENCE = 3.0
"""PyTorch's choice is kept unless another way is this many times faster: its numbers must not change with a
noisy measurement."""
_ROWS, _INNER, _COLUMNS = 128, 128, 256
"""Large enough to distinguish the implementations; 0.8 s in oneDNN's reference implementation."""
_REPETITIONS = 20
_ENOUGH_SECONDS = 1.0

IMPLEMENTATIONS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "PyTorch's choice": nullcontext,
    "PyTorch's emulation": partial(torch.backends.mkldnn.flags, enabled=False),
}
"""Contexts in which ``torch._scaled_mm`` computes; the first is preferred."""


class SlowFp8Error(ValueError):
    """No way of computing fp8 products is fast enough on this CPU."""

    must = f"an fp8 product must take at most {SLOWEST_RATIO:.0f} times as long as a bf16 product on this CPU"
    remedy = (
        "pass actor_rollout_ref.rollout.quantization=null: an engine in bf16 differs from a float32 trainer, "
        "too"
    )


class NoFp8CacheError(ValueError):
    """vLLM has no attention over a cache in fp8 on this CPU."""


@dataclass(frozen=True)
class Fp8Timings:
    """Milliseconds of one small product with each implementation."""

    bf16: float
    """Milliseconds of the same product of bf16 matrices."""
    fp8: Mapping[str, float]
    """Milliseconds by names of ``IMPLEMENTATIONS``; infinite where the CPU cannot do it that way."""

    @property
    def implementation(self) -> str:
        """The implementation to use. Raises ``SlowFp8Error`` when none is fast enough."""
        fastest = min(self.fp8.values())
        if fastest > SLOWEST_RATIO * self.bf16:
            raise SlowFp8Error(f"{SlowFp8Error.must}, got {self.times()}; {SlowFp8Error.remedy}.")
        return next(way for way, milliseconds in self.fp8.items() if milliseconds <= _PREFERENCE * fastest)

    def describe(self) -> str:
        """The chosen implementation and its times, as text."""
        return f"{self.implementation} ({self.times()})"

    def times(self) -> str:
        """The times as text."""
        shape = f"{_ROWS} x {_INNER} x {_COLUMNS}"
        times = {**self.fp8, "bf16": self.bf16}
        shown = (
            f"{way} {f'{time:.2f} ms' if isfinite(time) else 'impossible'}" for way, time in times.items()
        )
        return f"{shape} product: {', '.join(shown)}"


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
    for way, context in IMPLEMENTATIONS.items():
        with context():
            times[way] = _milliseconds(lambda: _product(left_fp8, right_fp8))
    return Fp8Timings(bf16, times)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Compute the product as vLLM's ``ChannelWiseTorchFP8ScaledMMLinearKernel`` calls it."""
    one = torch.ones(1, dtype=torch.float32)  # while vLLM builds a model, its precision is the default
    return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)


def _milliseconds(compute: Callable[[], Tensor]) -> float:
    """The shortest of some calls, so that other programs do not count; infinite when the call is not
    possible."""
    shortest, started = inf, time.perf_counter()
    try:
        for repetition in range(_REPETITIONS):
            before = time.perf_counter()
            compute()
            after = time.perf_counter()
            shortest = min(shortest, after - before)
            # One repetition at least: the first call includes what oneDNN compiles.
            if repetition and after - started > _ENOUGH_SECONDS:
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
