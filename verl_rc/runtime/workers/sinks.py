"""Attention whose softmax has one more logit for each head, without a value: a sink (gpt-oss).

``out = plain * sigmoid(lse - sink)``, ``lse`` being the log-sum-exp of the scores. PyTorch's kernels return
it but ignore its gradient. Their backward reads the probabilities from ``lse`` and the row sums from ``out``:
given the joint ``lse`` and the scaled output it returns the gradients of attention with sinks, and that of a
sink is ``-sum(exp(sink - lse) * (gradient . out))``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Parts = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """A kernel of attention with its backward; ``lse`` has the shape of the output without its last
    dimension."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the float32 or float64 log-sum-exp of the scores."""

    def gradients(self, gradient: Tensor, parts: Parts, output: Tensor, lse: Tensor) -> Parts:
        """Gradients of query, key and value."""

    def beside(self, sinks: Tensor) -> Tensor:
        """``sinks`` ``[heads]`` in a shape that broadcasts over ``lse``."""


def attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
    """The output of ``kernel`` with one more logit for each head; gradients reach all four tensors."""
    output: Tensor = _WithSinks.apply(query, key, value, sinks, kernel)  # type: ignore[no-untyped-call]
    return output


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        plain, lse = kernel.attend(query, key, value)
        logits = kernel.beside(sinks.to(lse.dtype))
        output = (plain * torch.sigmoid(lse - logits)[..., None]).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, torch.logaddexp(lse, logits))
        ctx.kernel = kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        parts = kernel.gradients(gradient.contiguous(), (query, key, value), output, lse)
        row_sums = (gradient.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        shares = torch.exp(kernel.beside(sinks.to(lse.dtype)) - lse) * row_sums
        of_heads = kernel.beside(torch.zeros_like(sinks, dtype=lse.dtype))
        return *parts, -shares.sum_to_size(of_heads.shape).flatten().to(sinks.dtype), None


@dataclass(frozen=True)
class GridKernel:
    """The CPU's, over ``[S, heads, Q, head_dim]`` and as many heads of keys."""

    mask: Tensor
    """bool, broadcasts to ``[S, heads, Q, K]``: the keys that a query sees."""
    scaling: float

    def _bias(self, like: Tensor) -> Tensor:
        return torch.zeros_like(self.mask, dtype=like.dtype).masked_fill(~self.mask, -torch.inf)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        forward: Callable[..., tuple[Tensor, Tensor]] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        )
        return forward(query, key, value, 0.0, False, attn_mask=self._bias(query), scale=self.scaling)

    def gradients(self, gradient: Tensor, parts: Parts, output: Tensor, lse: Tensor) -> Parts:
        """See ``Kernel``."""
        backward: Callable[..., Parts] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(
            gradient, *parts, output, lse, 0.0, False, attn_mask=self._bias(output), scale=self.scaling
        )

    def beside(self, sinks: Tensor) -> Tensor:
        """See ``Kernel``."""
        return sinks[:, None]


@dataclass(frozen=True)
class PackedKernel:
    """FlashAttention's for packed sequences, over ``[tokens, heads, head_dim]``."""

    ends: tuple[Tensor, Tensor]
    """int32: boundaries of queries and keys."""
    longest: tuple[int, int]
    scaling: float | None
    window: tuple[int, int]
    """Tokens that a query sees to its left, without itself, and to its right; -1: all."""
    grouped: bool
    """Whether several heads share their keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        attend = torch.ops.torch_attn._varlen_attn
        is_causal = self.window == (-1, 0)
        given = (query, key, value, *self.ends, *self.longest, is_causal, self.scaling, list(self.window))
        output, lse, _ = attend(*given, self.grouped)
        return output, lse.T

    def gradients(self, gradient: Tensor, parts: Parts, output: Tensor, lse: Tensor) -> Parts:
        """See ``Kernel``."""
        unused = torch.zeros(2, dtype=torch.uint64, device=output.device)  # the state of dropout
        is_causal = self.window == (-1, 0)
        backward: Callable[..., Parts] = torch.ops.torch_attn._varlen_attn_backward
        given = (gradient, *parts, output, lse.T.contiguous(), *self.ends, *self.longest)
        return backward(*given, is_causal, unused, self.scaling, list(self.window))

    def beside(self, sinks: Tensor) -> Tensor:
        """See ``Kernel``."""
        return sinks
