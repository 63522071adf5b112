"""Learning in float16: the scale of the loss, and whether this machine's CPU has products in float16."""

import time
from functools import cache
from typing import Any

import torch
from torch.amp import GradScaler

SLOWEST_RATIO = 4.0
"""How many times longer than in float32 a product may take in float16."""
_SIZE = 256
_REPETITIONS = 5


class LossScale(GradScaler):
    """The dynamic scale of the loss of a model that computes in float16, where small gradients would be 0.

    PyTorch's own: halved after a step whose gradient is not finite, doubled after 2,000 others. Its check for
    infinities is over the shards of all ranks. Other precisions have a scale of 1, which is no scale.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` is the precision of forward and backward."""
        super().__init__(device.type, enabled=dtype == torch.float16)

    @property
    def value(self) -> float | None:
        """What losses are multiplied by; None: they are not."""
        return self.get_scale() if self.is_enabled() else None

    def adjust(self) -> None:
        """Choose the scale of the next step from the gradient that was unscaled last."""
        self.update()
        # Below 1 it would no longer help: the gradient itself is not finite.
        if self.is_enabled() and self.get_scale() < 1.0:
            self.update(1.0)

    def resume(self, state: dict[str, Any]) -> None:
        """Set what ``state_dict`` returned; that of a run in another precision is left alone."""
        if state:
            self.load_state_dict(state)


class SlowFloat16Error(ValueError):
    """This CPU has no products in float16."""

    must = f"on a CPU a float16 product must take at most {SLOWEST_RATIO:.0f} times as long as in float32"
    remedy = "pass fsdp_config.dtype=bfloat16 for actor and critic, or train on a GPU"


def float16_product_seconds() -> tuple[float, float]:
    """Seconds of a weight's gradient in float16 and in float32, once per process.

    PyTorch computes float16 on every CPU. Without an instruction for it, it converts number by number.
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
        before = time.perf_counter()
        gradient.t() @ inputs
        seconds.append(time.perf_counter() - before)
    return min(seconds)
