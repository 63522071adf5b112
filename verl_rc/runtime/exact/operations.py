"""The linear layer of both sides on a CPU, a test of its batch invariance, and values with the gradient of
another operation."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_rc.runtime.exact import InexactError

_TILE = 16
"""Fewer than eight rows go through other kernels of MKL, which add in another order."""
_VECTOR = 64
"""Numbers of bfloat16 in a step of PyTorch's vector code; a shorter step goes through other functions."""
_ROWS = (1, 2, 3, 7, 17, 64, 129, 257, 1025)
_WIDEST = 4096


class _ValueAndGradient(torch.autograd.Function):
    """The first tensor's value, the second's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiable: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def with_gradient_of(differentiable: Callable[[], Tensor], value: Tensor) -> Tensor:
    """``value`` with the gradient of ``differentiable()``, which has the same shape and is called only where
    gradients are enabled."""
    if not torch.is_grad_enabled():
        return value
    return _ValueAndGradient.apply(value, differentiable())  # type: ignore[no-any-return, no-untyped-call]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` over rows padded with zeros to a multiple of 16; the result has the rows of ``x``."""
    rows = x.reshape(-1, x.shape[-1])
    padding = -len(rows) % _TILE
    padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
    return F.linear(padded, weight, bias)[: len(rows)].view(*x.shape[:-1], weight.shape[0])


def device_module(name: str) -> Any:
    """The module ``kernels`` or ``engine`` of exact mode for this process's device."""
    # Imported on demand: a trainer without exact mode runs where vLLM is not installed.
    return import_module(f"verl_rc.runtime.exact.{'gpu' if torch.cuda.is_available() else 'cpu'}_{name}")


def pad_to_vectors(x: Tensor) -> Tensor:
    """``x``, its last dimension padded with zeros to a multiple of 64."""
    padding = -x.shape[-1] % _VECTOR
    return F.pad(x, (0, padding)) if padding else x


def require_batch_invariance(
    shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor], Tensor] = linear,
    device: str = "cpu",
) -> None:
    """Raise ``InexactError`` naming the layer when a row's result depends on the number of rows.

    ``shapes``: inputs and outputs of the model's linear layers; those with more than 4,096 outputs are tested
    with 4,096. ``multiply``: the linear layer under test, on ``device``.
    """
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in sorted({(inputs, min(outputs, _WIDEST)) for inputs, outputs in shapes}):
        # Each product occurs with both signs: exact sums are 0, and what remains is the rounding of an order.
        half = inputs // 2
        order = torch.randperm(2 * half, generator=generator)
        weight, x = (torch.randn(rows, half, generator=generator) for rows in (outputs, _ROWS[-1]))
        weight, x = (
            F.pad(torch.cat(halves, 1)[:, order], (0, inputs % 2)).to(device, dtype)
            for halves in ([weight, weight], [x, -x])
        )
        all_rows = multiply(x, weight)
        for rows in _ROWS:
            first, last = multiply(x[:rows], weight), multiply(x[-rows:], weight)
            different = (first != all_rows[:rows]) | (last != all_rows[-rows:])
            if different.any():
                raise InexactError(
                    f"exact mode needs linear layers whose rows do not depend on the batch, but here "
                    f"{int(different.sum())} numbers of a layer of {inputs} inputs and {outputs} outputs in "
                    f"{dtype} on {device} differ between {rows} and {_ROWS[-1]} rows; drop "
                    "actor_rollout_ref.exact, or on a CPU set ONEDNN_MAX_CPU_ISA or MKL_ENABLE_INSTRUCTIONS "
                    "to another set of instructions."
                )
