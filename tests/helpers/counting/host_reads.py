"""Counting how often code reads tensors on the host, whatever the spelling: each of them waits for the
device."""

import traceback
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__bool__,
    torch.Tensor.__index__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
    torch.Tensor.equal,
    torch.equal,
}


class HostReads(TorchFunctionMode):
    """Notes the place of every read in the package, as ``file:function``, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS:
            frames = [frame for frame in traceback.extract_stack() if "verl_rc/" in frame.filename]
            if frames:
                self.places.append(f"{frames[-1].filename.rpartition('verl_rc/')[2]}:{frames[-1].name}")
        return function(*args, **(kwargs or {}))
