"""A check of the functions of vLLM that exact mode needs, and the layout of its paged KV cache."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_rc.runtime.exact import InexactError


def require_functions(functions: Mapping[str, str]) -> None:
    """Raise ``InexactError`` naming the first of the ``functions`` that is missing or lacks an argument.

    ``functions``: the arguments that each must take, by ``module:name``.
    """
    for function, arguments in functions.items():
        needed = f"exact mode needs the vLLM of requirements/, whose internals it replaces: {function}"
        module, name = function.split(":")
        try:
            parameters = set(inspect.signature(attrgetter(name)(import_module(module))).parameters)
        except (ImportError, AttributeError) as error:
            raise InexactError(f"{needed}, which has none: {error}.") from error
        if missing := sorted(set(arguments.split()) - parameters):
            raise InexactError(f"{needed} with {', '.join(missing)}; it takes {sorted(parameters)}.")


def paged_layout(lengths: Tensor, block: int) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """The layout of N packed tokens in a KV cache.

    ``lengths``: of their sequences, int64. ``block``: tokens in a block of the cache.

    Returns the number of blocks; the sequence, the position in it and the slot in the cache of each token
    (int64 ``[N]`` each); and the block table (int32 ``[sequences, most blocks]``).
    """
    blocks = (lengths + block - 1) // block
    first_blocks = F.pad(blocks.cumsum(0), (1, 0))
    sequences = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(sequences), device=lengths.device) - starts[sequences]
    num_blocks = int(first_blocks[-1])
    offsets = torch.arange(int(blocks.max()), device=lengths.device)
    block_table = (first_blocks[:-1, None] + offsets).clamp_max(num_blocks - 1).int()
    return num_blocks, sequences, positions, first_blocks[sequences] * block + positions, block_table
