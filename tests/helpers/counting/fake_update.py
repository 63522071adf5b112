"""Memory of one rank in an update, measured by running the project's own code on tensors without memory.

``python fake_update.py [--experts] [LAYERS TOKENS SHARING [TOKENS SHARING]...]``: of micro-batches with so
many tokens that so many ranks share, of a dense model or one with experts. Prints a line of JSON for each. A
dispatch mode follows every storage; FSDP frees by resizing storages, so their sizes are read anew.
"""

import json
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from verl_rc.config.models import ActorConfig, LearnerFsdpConfig
from verl_rc.runtime.distributed.sequence_parallel import divide_ranks
from verl_rc.runtime.workers import forward, scoring_head
from verl_rc.runtime.workers.attention import PACKED_ATTENTION
from verl_rc.runtime.workers.packed_layout import PackedLayout
from verl_rc.runtime.workers.scoring_head import PredictedTokens, add_scoring
from verl_rc.runtime.workers.sharded_model import LearningModel
from verl_rc.tensor_ops import ScoreOptions

RANKS = 8
DEFAULT = (4, 16_384, 1)
"""Layers, tokens of a micro-batch, ranks that share it."""
SIZES = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
"""Of Qwen2.5-7B, which has 28 layers."""
WITH_EXPERTS = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Of Qwen3-30B-A3B, which has 48 layers."""


class Living(TorchDispatchMode):
    """The storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self.peak = 0

    def add(self, tensor: Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = weakref.ref(storage)
            weakref.finalize(storage, self._storages.pop, id(storage), None)

    def bytes(self) -> int:
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.peak = max(self.peak, self.bytes())
        return result


def attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Its shape, and a gradient for all three: everything is measured but the kernel."""
    return query * (key.mean() + value.mean())


def model_config(layers: int, experts: bool) -> PretrainedConfig:
    """Of either model with other layers."""
    shared = {"num_hidden_layers": layers, "vocab_size": 152_064, "tie_word_embeddings": False}
    return Qwen3MoeConfig(**WITH_EXPERTS, **shared) if experts else Qwen2Config(**SIZES, **shared)


def measure(mesh: DeviceMesh, whole_gradients: bool, layers: int, layout: PackedLayout) -> dict[str, int]:
    """Bytes at rest, between two micro-batches, and at the peak of two."""
    scoring_head._logit_factor = lambda model: 1.0  # read from a number, which fake tensors have none of
    model = AutoModelForCausalLM.from_config(
        model_config(layers, "--experts" in sys.argv),
        attn_implementation=PACKED_ATTENTION,
        dtype=torch.float32,
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fsdp = LearnerFsdpConfig(use_no_sync_for_gradient_accumulation=whole_gradients)
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=1, fsdp_config=fsdp)
    sharded, living = LearningModel(add_scoring(model), mesh, actor, 1), Living()
    for parameter in model.parameters():
        living.add(parameter)
    found = {"at rest": living.bytes()}
    own = layout.grid_index.numel() // (1 if layout.ranks is None else layout.ranks.size)
    with living:
        for index in range(2):
            sharded.set_gradient_sync(index == 1)
            ids, keep = torch.randint(0, 1000, (1, own)), torch.arange(own // 2)
            predicted = PredictedTokens(
                keep, torch.zeros(len(keep), dtype=torch.int64), ScoreOptions(1.0, False, False, False)
            )
            inputs = {
                "input_ids": ids,
                "position_ids": torch.arange(own)[None],
                "attention_mask": None,
                "use_cache": False,
            }
            scores = sharded.module(predicted=predicted, **inputs, packed_layout=layout)
            scores.log_probs.mean().backward()
            found["between"] = found.get("between", living.bytes())
    return {**found, "peak": living.peak}


if __name__ == "__main__":
    torch.set_num_threads(1)
    forward.F = SimpleNamespace(scaled_dot_product_attention=attention)  # type: ignore[assignment]
    layers, *pairs = [int(word) for word in sys.argv[1:] if word != "--experts"] or DEFAULT
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    ranks = init_device_mesh("cpu", (RANKS,))
    for tokens, sharing in zip(pairs[::2], pairs[1::2], strict=True):
        places = PackedLayout.from_lengths(torch.tensor([tokens]), divide_ranks(ranks, sharing)[1])
        with FakeTensorMode(allow_non_fake_inputs=True):
            numbers = {str(whole): measure(ranks, whole, layers, places) for whole in (True, False)}
        sys.stdout.write(f"{json.dumps(numbers)}\n")
