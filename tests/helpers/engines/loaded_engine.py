"""An engine that can be given weights without a trainer, and says how many heads it keeps in float32."""

import torch
from torch import Tensor

from verl_rc.runtime.rollout.vllm import float32_head, receiver, sampler
from verl_rc.runtime.rollout.vllm.engine import VllmEngine
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.rollout.vllm.picture_input import picture_input
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.workers.language_model import torch_dtype


class LoadedEngine(VllmEngine):
    """The engine, in a process of its own."""

    def load(self, tensors: dict[str, Tensor], version: int, dtype: str = "bfloat16") -> list[LoadReceipt]:
        """Take ``tensors`` by name as a weight update, in ``dtype``."""
        names = {name: TensorSpec(name, dtype, tuple(value.shape)) for name, value in tensors.items()}
        cast = {name: value.detach().to(torch_dtype(dtype)) for name, value in tensors.items()}
        staged = [
            (bucket, torch.cat([cast[spec.name].flatten() for spec in bucket]))
            for bucket in Manifest(tuple(names.values())).buckets(1 << 30)
        ]
        self.begin_update()
        self._loop.call(lambda own: own.load(staged))
        return self.finish_update(version)

    def num_copies(self) -> int:
        return len(float32_head._float32_weights)


class StalePictures(LoadedEngine):
    """Gives vLLM the same hash of a picture under all weights."""

    def __init__(self, options: VllmOptions) -> None:
        sampler.picture_input = lambda reader, ids, pictures, version, salt: picture_input(
            reader, ids, pictures, 0, salt
        )
        super().__init__(options)


class DroppingEngine(LoadedEngine):
    """Hands vLLM the weights under their own names: some of gpt-oss' are lost."""

    def load(self, tensors: dict[str, Tensor], version: int, dtype: str = "bfloat16") -> list[LoadReceipt]:
        receiver.by_loaders = lambda _, weights: iter(weights)
        return super().load(tensors, version, dtype)
