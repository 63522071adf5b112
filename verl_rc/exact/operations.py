"""The linear layer of both sides on a CPU, a test that its rows do not depend on the batch, and values with
the gradient of another operation."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_rc.exact import InexactError

_TILE = 16
"""Fewer than eight rows go through other kernels of MKL, which add in another order."""
_VECTOR = 64
"""Numbers of bfloat16 that PyTorch takes at once; what is left at the end goes through other functions."""
_ROWS = (1, 2, 3, 7, 17, 64, 129, 257, 1025)
_WIDEST = 4096


class _ValueOf(torch.autograd.Function):
    """The first tensor's value, the second's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiable: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def value_of(value: Tensor, ordinary: Callable[[], Tensor]) -> Tensor:
    """``value`` with the gradient of ``ordinary()``, of the same shape, which is called where gradients are
    asked for."""
    if not torch.is_grad_enabled():
        return value
    return _ValueOf.apply(value, ordinary())  # type: ignore[no-any-return, no-untyped-call]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` over a multiple of 16 rows: the last ones are zeros, and are cut off again."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % _TILE
    padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    return F.linear(padded, weight, bias)[: len(rows)].view(*x.shape[:-1], weight.shape[0])


def of_this_device(part: str) -> Any:
    """The module ``kernels`` or ``engine`` of exact mode for this process's device."""
    # By its name: a trainer without exact mode runs where vLLM is not installed.
    return import_module(f"verl_rc.exact.{'gpu' if torch.cuda.is_available() else 'cpu'}_{part}")


def whole_vectors(x: Tensor) -> Tensor:
    """``x``, with zeros behind the last dimension up to a multiple of 64."""
    missing = -x.shape[-1] % _VECTOR
    return F.pad(x, (0, missing)) if missing else x


def require_rows_alone(
    shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor], Tensor] = linear,
    device: str = "cpu",
) -> None:
    """Raise ``InexactError`` naming the layer when a row's result depends on how many rows come with it.

    ``shapes``: inputs and outputs of the model's linear layers, which ``multiply`` on ``device``; wider ones
    are tested with 4,096 outputs.
    """
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in sorted({(inputs, min(outputs, _WIDEST)) for inputs, outputs in shapes}):
        # Every product comes once with each sign: sums are what their order rounds, and nothing else.
        half = inputs // 2
        shuffled = torch.randperm(2 * half, generator=generator)
        weight, x = (torch.randn(rows, half, generator=generator) for rows in (outputs, _ROWS[-1]))
        weight, x = (
            F.pad(torch.cat(halves, 1)[:, shuffled], (0, inputs % 2)).to(device, dtype)
            for halves in ([weight, weight], [x, -x])
        )
        whole = multiply(x, weight)
        for rows in _ROWS:
            first, last = multiply(x[:rows], weight), multiply(x[-rows:], weight)
            different = (first != whole[:rows]) | (last != whole[-rows:])
            if different.any():
                raise InexactError(
                    f"exact mode needs linear layers whose rows do not depend on the batch, but here "
                    f"{int(different.sum())} numbers of a layer of {inputs} inputs and {outputs} outputs in "
                    f"{dtype} on {device} differ between {rows} and {_ROWS[-1]} rows; drop "
                    "actor_rollout_ref.exact, or on a CPU set ONEDNN_MAX_CPU_ISA or MKL_ENABLE_INSTRUCTIONS "
                    "to another set of instructions."
                )
