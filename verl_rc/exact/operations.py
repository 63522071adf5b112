"""The linear layer of both sides, and a test that its rows do not depend on the batch."""

from collections.abc import Iterable

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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` over a multiple of 16 rows: the last ones are zeros, and are cut off again."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % _TILE
    padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    return F.linear(padded, weight, bias)[: len(rows)].view(*x.shape[:-1], weight.shape[0])


def whole_vectors(x: Tensor) -> Tensor:
    """``x``, with zeros behind the last dimension up to a multiple of 64."""
    missing = -x.shape[-1] % _VECTOR
    return F.pad(x, (0, missing)) if missing else x


def require_rows_alone(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
    """Raise ``InexactError`` naming the layer when a row's result depends on how many rows come with it.

    ``shapes``: inputs and outputs of the model's linear layers; wider ones are tested with 4,096 outputs.
    """
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in sorted({(inputs, min(outputs, _WIDEST)) for inputs, outputs in shapes}):
        # Every product comes once with each sign: sums are what their order rounds, and nothing else.
        half = inputs // 2
        shuffled = torch.randperm(2 * half, generator=generator)
        weight, x = (torch.randn(rows, half, generator=generator) for rows in (outputs, _ROWS[-1]))
        weight, x = (
            F.pad(torch.cat(halves, 1)[:, shuffled], (0, inputs % 2)).to(dtype)
            for halves in ([weight, weight], [x, -x])
        )
        whole = linear(x, weight)
        for rows in _ROWS:
            first, last = linear(x[:rows], weight), linear(x[-rows:], weight)
            different = (first != whole[:rows]) | (last != whole[-rows:])
            if different.any():
                raise InexactError(
                    f"exact mode needs linear layers whose rows do not depend on the batch, but on this CPU "
                    f"{int(different.sum())} numbers of a layer of {inputs} inputs and {outputs} outputs in "
                    f"{dtype} differ between {rows} and {_ROWS[-1]} rows; drop actor_rollout_ref.exact, or "
                    "set ONEDNN_MAX_CPU_ISA or MKL_ENABLE_INSTRUCTIONS to another set of instructions."
                )
