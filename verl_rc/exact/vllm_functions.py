"""What exact mode needs of vLLM: functions by name and arguments, and sequences in pages of its cache."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_rc.exact import InexactError


def require_functions(needed: Mapping[str, str]) -> None:
    """Raise ``InexactError`` naming the first of the ``needed`` operations that is not as expected.

    ``needed``: by ``module:name``, the arguments that it must take.
    """
    for operation, arguments in needed.items():
        module, name = operation.split(":")
        try:
            takes = set(inspect.signature(attrgetter(name)(import_module(module))).parameters)
        except (ImportError, AttributeError) as error:
            raise InexactError(f"{_moved(operation)}, which has none: {error}.") from error
        if missing := sorted(set(arguments.split()) - takes):
            raise InexactError(f"{_moved(operation)} with {', '.join(missing)}; it takes {sorted(takes)}.")


def _moved(operation: str) -> str:
    return f"exact mode needs the vLLM of requirements/, whose internals it replaces: {operation}"


def pages(lengths: Tensor, block: int) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """Where the N tokens of packed sequences of ``lengths`` (int64) lie in a cache of blocks of ``block``
    tokens.

    Returns the number of blocks; int64 ``[N]`` each: the sequence of a token, its positions in the sequence
    and in the cache; and int32 ``[sequences, most blocks]``: the blocks of each sequence.
    """
    blocks = (lengths + block - 1) // block
    first_blocks = F.pad(blocks.cumsum(0), (1, 0))
    rows = torch.repeat_interleave(lengths)
    positions = torch.arange(len(rows), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
    num_blocks = int(first_blocks[-1])
    within = torch.arange(int(blocks.max()), device=rows.device)
    table = (first_blocks[:-1, None] + within).clamp_max(num_blocks - 1).int()
    return num_blocks, rows, positions, first_blocks[rows] * block + positions, table
