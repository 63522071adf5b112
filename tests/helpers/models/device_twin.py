"""Tensors that say ``cuda:0``, compute on the CPU, and raise when devices mix: what a GPU would refuse,
without one."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_COPY = torch.ops.aten.copy_.default
"""The one operation that takes tensors of two devices; its result is the first of them."""


class MixedDevicesError(AssertionError):
    """An operation got tensors of both devices, as a GPU would refuse it."""


class DeviceTwin:
    """A context in which memory that was put on ``cuda:0`` stays there, with all that is computed from it.

    Storages are remembered: views and saved tensors have those of their tensors, and gradients come from
    operations on them.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self._calls: list[bool] = []
        self.operations = 0
        """Operations on tensors of ``cuda:0``; 0 says that a test watched nothing."""
        self._modes = (_Functions(self), _Operations(self))

    def __enter__(self) -> "DeviceTwin":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Move memory to ``cuda:0``, such as that of a module's parameters and buffers."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # The reference keeps the address, but not the memory: no later storage can be taken for this one.
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is on ``cuda:0``."""
        return tensor.untyped_storage()._cdata in self._storages


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


class _Functions(TorchFunctionMode):
    """What Python calls: devices that are asked for and named."""

    def __init__(self, twin: DeviceTwin) -> None:
        super().__init__()
        self._twin = twin

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        twin, kwargs = self._twin, dict(kwargs or {})
        if func in (_DEVICE, _IS_CUDA):
            found = func(*args)
            return (CUDA if func == _DEVICE else True) if twin.holds(args[0]) else found
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, args, kwargs)
        device = kwargs.pop("device", None)
        if device is not None:
            kwargs["device"] = "cpu"
        inputs = _tensors((args, kwargs))
        on_gpu = _is_cuda(device) or (device is None and any(twin.holds(tensor) for tensor in inputs))
        twin._calls.append(on_gpu)
        try:
            result = func(*args, **kwargs)
        finally:
            twin._calls.pop()
        if _is_cuda(device):
            twin.put(_tensors(result))
        return result

    def _moved(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        tensor, *others = args
        named = [
            value for value in (*others, kwargs.pop("device", None)) if isinstance(value, str | torch.device)
        ]
        like = [value for value in others if isinstance(value, Tensor)]
        to_gpu = func is Tensor.cuda or any(map(_is_cuda, named)) or any(map(self._twin.holds, like))
        is_named = bool(named or like) or func is not Tensor.to
        others = [value for value in others if not isinstance(value, str | torch.device | Tensor)]
        result: Tensor = Tensor.to(tensor, *others, **kwargs) if others or kwargs else tensor
        was_on_gpu = self._twin.holds(tensor)
        if is_named and to_gpu != was_on_gpu:
            self._twin._calls.append(to_gpu)
            result = _Move.apply(result, self._twin, to_gpu)
            self._twin._calls.pop()
        return result


class _Move(torch.autograd.Function):
    """A copy on the other device, whose gradient travels back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, twin: DeviceTwin, to_gpu: bool) -> Tensor:
        ctx.twin, ctx.to_gpu = twin, to_gpu
        return _copied(tensor, twin, to_gpu)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _copied(gradient, ctx.twin, not ctx.to_gpu), None, None


def _copied(tensor: Tensor, twin: DeviceTwin, to_gpu: bool) -> Tensor:
    copy = torch.from_numpy(tensor.detach().float().numpy().copy()).to(tensor.dtype)
    if to_gpu:
        twin.put([copy])
    return copy


class _Operations(TorchDispatchMode):
    """What is computed, also in backward passes: results lie where their inputs do."""

    def __init__(self, twin: DeviceTwin) -> None:
        super().__init__()
        self._twin = twin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        twin, inputs = self._twin, _tensors((args, kwargs or {}))
        on_gpu = [tensor for tensor in inputs if twin.holds(tensor)]
        # A number without dimensions may lie on the CPU, as on a real GPU.
        beside = [tensor for tensor in inputs if tensor.ndim and not twin.holds(tensor)]
        if on_gpu and beside and func is not _COPY:
            raise MixedDevicesError(
                f"{func} got tensors on cuda:0 and on the CPU {[t.shape for t in beside]}."
            )
        result = func(*args, **(kwargs or {}))
        twin.operations += bool(on_gpu)
        # Without inputs, what an operation or a backward pass makes for itself lies with its tensors.
        if (on_gpu and func is not _COPY) or (not inputs and (not twin._calls or twin._calls[-1])):
            twin.put(_tensors(result))
        return result
