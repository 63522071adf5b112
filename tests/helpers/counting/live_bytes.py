"""Counting the memory that tensor operations hold, without allocating it where tensors are fake."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations inside the block make, from the operation to the last
    reference."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.peak = 0
        """The most bytes that were alive at once."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and id(storage := tensor.untyped_storage()) not in inputs | self._alive.keys()
            ):
                self._alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, id(storage), None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result
