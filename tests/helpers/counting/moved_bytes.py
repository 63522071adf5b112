"""Counting the bytes that tensor operations read and write, without any where tensors are on ``meta``."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

P = ParamSpec("P")
R = TypeVar("R")

_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like")
_AT_PLACES = ("aten::gather", "aten::scatter", "aten::scatter_")
"""They touch as many numbers of their first tensor as there are places."""


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes of the operations inside the block: each reads its tensors and writes its results;
    views are free.

    A function that ``kernel`` returns counts as compiled, by this model: numbers between its inputs and
    results stay in registers. What is summed over a row needs a loop over the row, and a loop that needs such
    a sum comes after it and reads the inputs again; all sums of one loop share a read. So a softmax reads its
    input three times (maximum, sum, result) and writes once. Caches serve no read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._kernel: _Kernel | None = None

    def kernel(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function as one kernel."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self._kernel = _Kernel(_tensors((args, kwargs)))
            result = function(*args, **kwargs)
            self.bytes += self._kernel.bytes(_tensors(result))
            self._kernel = None
            return result

        return run

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        result = function(*args, **kwargs)
        schema = function._schema
        is_view = any(part.alias_info and not part.alias_info.is_write for part in schema.returns)
        if is_view or schema.name in _ALLOCATIONS:
            return result
        kwargs.pop("out", None)
        if self._kernel is not None:
            self._kernel.add(_tensors((args, kwargs)), _tensors(result))
        elif schema.name in _AT_PLACES:
            source, _, places, *values = args
            self.bytes += places.nbytes + places.numel() * source.itemsize * 2
            self.bytes += sum(_size(part) for part in _tensors(values))
        else:
            self.bytes += sum(map(_size, _tensors((args, kwargs)))) + sum(map(_size, _tensors(result)))
        return result


class _Kernel:
    """Which loop of a kernel computes each tensor, and which inputs the loop reads for it."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self._tensors = list(inputs)  # alive, so that no address is used twice
        self._loops = {_address(tensor): 0 for tensor in inputs}
        self._sources = {_address(tensor): {_address(tensor): _size(tensor)} for tensor in inputs}
        self._reads: dict[tuple[int, int], int] = {}

    def add(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        addresses = [_address(tensor) for tensor in inputs]
        loop = max((self._loops.get(address, 0) for address in addresses), default=0)
        sources = {name: size for key in addresses for name, size in self._sources.get(key, {}).items()}
        widest = max((tensor.numel() for tensor in inputs), default=0)
        for result in results:
            self._tensors.append(result)
            if result.numel() < widest:
                self._read(loop, sources)
                self._loops[_address(result)], self._sources[_address(result)] = loop + 1, {}
            else:
                self._loops[_address(result)], self._sources[_address(result)] = loop, sources

    def bytes(self, results: list[Tensor]) -> int:
        """Bytes of all reads, and of the results."""
        for result in results:
            self._read(self._loops[_address(result)], self._sources[_address(result)])
        return sum(self._reads.values()) + sum(map(_size, results))

    def _read(self, loop: int, sources: dict[int, int]) -> None:
        self._reads |= {(loop, name): size for name, size in sources.items()}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, or of its memory where it is expanded."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
