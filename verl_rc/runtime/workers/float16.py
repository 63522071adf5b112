"""Learning in float16: the scale of the loss, and whether this machine's CPU has products in float16."""

import time
from functools import cache
from typing import Any

import torch
from torch.amp import GradScaler

SLOWEST_RATIO = 4.0
"""The largest time of a product in float16, as a multiple of its time in float32."""
_SIZE = 256
_REPETITIONS = 5


class LossScale(GradScaler):
    """The dynamic loss scale of a model that computes in float16, where small gradients would be 0.

    PyTorch halves it after a step whose gradient is not finite, and doubles it after 2,000 other steps in a
    row. The check is over the shards of all ranks. Other precisions have no scale.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` is the precision of forward and backward."""
        super().__init__(device.type, enabled=dtype == torch.float16)

    @property
    def value(self) -> float | None:
        """Factor of the losses, or None without one."""
        return self.get_scale() if self.is_enabled() else None

    def adjust(self) -> None:
        """Set the scale of the next step, by the last unscaled gradient."""
        self.update()
        # Below 1 it would no longer help: the gradient itself is not finite.
        if self.is_enabled() and self.get_scale() < 1.0:
            self.update(1.0)

    def resume(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict``; that of a run in another precision is empty and changes nothing."""
        if state:
            self.load_state_dict(state)


class SlowFloat16Error(ValueError):
    """This CPU has no products in float16."""

    must = f"on a CPU a float16 product must take at most {SLOWEST_RATIO:.0f} times as long as in float32"
    remedy = "pass fsdp_config.dtype=bfloat16 for actor and critic, or train on a GPU"


def float16_product_seconds() -> tuple[float, float]:
    """Seconds of a product like that of a weight's gradient, in float16 and in float32; measured once per
    process.

    On a CPU without float16 instructions PyTorch converts number by number.
    """
    return _seconds(torch.float16), _seconds(torch.float32)


def require_float16_products(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``SlowFloat16Error`` where a model would learn in float16 on a CPU that has no products in it."""
    if dtype != torch.float16 or device.type != "cpu":
        return
    float16, float32 = float16_product_seconds()
    if float16 > SLOWEST_RATIO * float32:
        raise SlowFloat16Error(
            f"{SlowFloat16Error.must}, got {1e3 * float16:.2f} and {1e3 * float32:.2f} ms; "
            f"{SlowFloat16Error.remedy}."
        )


@cache
def _seconds(dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    gradient, inputs = (torch.randn(_SIZE, _SIZE, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        gradient.t() @ inputs
        seconds.append(time.perf_counter() - started)
    return min(seconds)
