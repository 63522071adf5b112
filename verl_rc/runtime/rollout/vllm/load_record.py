"""What vLLM's layerwise reload has really loaded.

A model's ``load_weights`` returns names, also those that it copied straight into parameters: these are on the
meta device during a reload, and nothing is stored (gpt-oss' experts and sinks, vLLM 0.32). It skips others
without a word (an output head of Cohere that is not its embedding). Both are seen where all loaders meet.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from verl_rc.runtime.rollout.vllm.signatures import require_parameters

_get_numel_loaded = layerwise.get_numel_loaded


class LoadRecord:
    """The parameters that an update has filled, and the tensors that it had and no loader has read."""

    current: "LoadRecord | None" = None
    """The record of the update that is running."""

    def __init__(self, model: torch.nn.Module) -> None:
        """For a model in loadable form."""
        # It lacks the parameters that online quantisation derives from weights, and has the scales of an fp8
        # KV cache, which only some checkpoints fill. The tensors are kept: their ids are the keys.
        self._parameters = {id(one): (name, one) for name, one in model.named_parameters()}
        self._read = set[int]()
        self.filled = set[str]()
        """Parameters that a loader has written."""
        self.unread = set[str]()
        """Tensors of the update whose bytes no loader has read."""
        LoadRecord.current = self

    def missing(self) -> set[str]:
        """Parameters that an update must fill, and this one has not."""
        # A reload keeps the tensors of SKIP_LOAD_TENSORS as the checkpoint had them: they are buffers of the
        # trainer's model, which training does not change (the bias of GLM's router).
        names = {
            name
            for name, _ in self._parameters.values()
            if not name.endswith("_scale") and name.rpartition(".")[2] not in SKIP_LOAD_TENSORS
        }
        return names - self.filled

    def add(self, arguments: Mapping[str, Any], num_elements: int) -> None:
        """A loader has written so many elements."""
        target = arguments.get("param")
        if num_elements and id(target) in self._parameters:
            self.filled.add(self._parameters[id(target)][0])
        sources = (one for one in arguments.values() if isinstance(one, Tensor) and one is not target)
        self._read |= {one.data_ptr() for one in sources}

    def end_bucket(self, tensors: Mapping[str, Tensor]) -> None:
        """Note which of the tensors of a bucket were not read since the last one."""
        for name, tensor in tensors.items():
            first = tensor.data_ptr()
            if not any(first <= place < first + tensor.nbytes for place in self._read):
                self.unread.add(name)
        self._read.clear()


def by_loaders(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights under names for which ``model`` calls loaders: gpt-oss' experts one by one. Loaders of its
    sinks are called here."""
    if type(model).__name__ != "GptOssForCausalLM":
        yield from weights
        return
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".mlp.experts"):
            yield from ((f"{stem}.{expert}.{kind}", part) for expert, part in enumerate(tensor))
        elif kind == "sinks":
            parameter = parameters[name.replace(".self_attn.", ".attn.")]
            first = get_tensor_model_parallel_rank() * len(parameter)
            parameter.weight_loader(parameter, tensor[first : first + len(parameter)])
        else:
            yield name, tensor


def _record_loaded(
    weight_loader: Callable[..., Any], arguments: inspect.BoundArguments
) -> tuple[int, object]:
    num_elements, result = _get_numel_loaded(weight_loader, arguments)
    if LoadRecord.current is not None:
        LoadRecord.current.add(arguments.arguments, num_elements)
    return num_elements, result


require_parameters(_get_numel_loaded, ["weight_loader", "args"], "records what is loaded")
layerwise.get_numel_loaded = _record_loaded
