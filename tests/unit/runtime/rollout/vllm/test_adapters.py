"""The adapter in vLLM: which layers take one, what is computed with it, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from verl_rc.runtime.rollout.vllm import adapters


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_room_is_made_for_the_rank(rank: int, room: int) -> None:
    assert adapters.adapter_arguments(rank) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
    }


class Wrapper(BaseLayerWithLoRA):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_without_its_wrappers_a_model_has_the_names_of_its_weights_and_then_they_are_back() -> None:
    """Also where two places share one."""
    wrapper = Wrapper(nn.Linear(2, 3, bias=False))
    model = nn.Module()
    model.block = nn.ModuleDict({"gate": wrapper, "alias": wrapper, "norm": nn.LayerNorm(2)})
    taken = adapters.detach_adapter_layers(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert names == {"block.gate.weight", "block.alias.weight", "block.norm.weight", "block.norm.bias"}
    adapters.attach_layers(model, taken)
    assert model.block["gate"] is model.block["alias"] is wrapper


class Manager:
    """vLLM's, which has one layer for two linear ones and one for itself."""

    device, lora_config = torch.device("cpu"), SimpleNamespace(lora_dtype=torch.float32)
    model = nn.Module()

    def __init__(self, keeps: bool = False) -> None:
        self.modules, self.keeps, self.held = {"a.qkv": None, "a.o": None}, keeps, dict[int, Any]()

    def remove_adapter(self, number: int) -> None:
        self.held.pop(number, None)

    def add_adapter(self, adapter: Any) -> bool:
        if "a.q" in adapter.loras:
            adapter.loras["a.qkv"] = adapter.loras.pop("a.q")
        self.held[adapter.id] = adapter
        return not self.keeps

    def activate_adapter(self, number: int) -> bool:
        return number in self.held


def factors(*layers: str) -> dict[str, torch.Tensor]:
    sizes = {".lora_A.weight": (3, 4), ".lora_B.weight": (5, 3)}
    return {layer + end: torch.full(size, 2.0) for layer in layers for end, size in sizes.items()}


def test_the_adapter_of_an_update_takes_the_place_of_the_one_before() -> None:
    manager = Manager()
    adapters.apply_adapter(manager, factors("a.q"))
    adapters.apply_adapter(manager, factors("a.q", "a.o"))
    (held,) = manager.held.values()
    assert held.loras.keys() == {"a.qkv", "a.o"}
    assert {(layer.rank, layer.scaling) for layer in held.loras.values()} == {(3, 1.0)}


def test_of_a_factor_that_came_alone_nothing_is_applied() -> None:
    manager = Manager()
    adapters.apply_adapter(manager, {"a.q.lora_A.weight": torch.ones(3, 4), **factors("a.o")})
    assert manager.held[1].loras.keys() == {"a.o"}
    adapters.apply_adapter(manager, {"a.q.lora_A.weight": torch.ones(3, 4)})
    assert not manager.held


def test_a_layer_that_takes_no_adapter_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"1 have none, the first: a.conv. Take these out of"):
        adapters.apply_adapter(Manager(), factors("a.q", "a.conv"))


def test_an_adapter_that_vllm_keeps_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="but it still has the one before"):
        adapters.apply_adapter(Manager(keeps=True), factors("a.q"))


def wrapper_of(indices: list[int]) -> PunicaWrapperCPU:
    """For one adapter, with the adapter of each token, -1: none."""
    wrapper = PunicaWrapperCPU(8, 8, torch.device("cpu"))
    tokens = torch.tensor(indices)
    wrapper._token_lora_indices[: len(indices)] = tokens
    wrapper.indices_len[0] = len(indices)
    wrapper._update_prefill_metadata(tokens)
    wrapper.is_prefill = True
    return wrapper


@pytest.mark.parametrize("indices", [[0, 0, 0], [0, -1, 0], [-1, -1, -1]])
def test_each_token_with_the_adapter_gets_its_product_in_each_slice(indices: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 4, generator=generator), torch.randn(3, 7, generator=generator)
    first = tuple(torch.randn(1, 1, 8, 4, generator=generator) for _ in range(2))
    second = tuple(torch.randn(1, 1, size, 8, generator=generator) for size in (5, 2))
    expected = y.double()
    for token, index in enumerate(indices):
        for a, b, start in ((first[0], second[0], 0), (first[1], second[1], 5)):
            for row in range(b.shape[2] if index == 0 else 0):
                inner = [float(a[0, 0, place].double() @ x[token].double()) for place in range(8)]
                expected[token, start + row] += 0.5 * sum(
                    float(b[0, 0, row, place]) * inner[place] for place in range(8)
                )
    wrapper = wrapper_of(indices)
    found = y.clone()
    adapters._add_adapter_product(wrapper, found, x, first, second, 0.5, (5, 2))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    rounded = y.bfloat16()
    adapters._add_adapter_product(wrapper, rounded, x.bfloat16(), first, second, 0.5, (5, 2))
    assert (rounded.double() - expected).abs().max() < 0.1
