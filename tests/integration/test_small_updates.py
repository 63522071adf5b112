"""An update too small for a quantised engine's numbers is lost when it is merged, and acts as an adapter."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import GREEDY
from small_engines import BUCKET_BYTES, publish, start_small_engine
from small_models import log_probs
from transformers import AutoModelForCausalLM

from verl_rc.config.models import ModelConfig
from verl_rc.records.parts import Sample, token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.runtime.weight_sync.sender import WeightSender
from verl_rc.runtime.workers.lora import add_adapters, engine_weights

CONFIG = ModelConfig.model_validate({"path": "m", "lora_rank": 1, "lora_alpha": 2, "lora": {"merge": False}})
SIZE, LARGEST, SMALL = 0.125, 0.25, 0.0038
"""Of the weights; of the first in each row, which sets the row's scale; and of their update. In fp8 the first
is 448 and the others are 224, whose neighbours are 208 and 240: 3 % more or less is 224 again."""
SHORT = replace(GREEDY, max_tokens=2)
PROMPTS = [[3 + (7 * row + place) % 200 for place in range(6)] for row in range(48)]


def signs(*shape: int) -> torch.Tensor:
    return 2.0 * torch.randint(0, 2, shape) - 1.0


def model_of(folder: Path) -> Any:
    """In float32, with adapters that do nothing yet."""
    torch.manual_seed(0)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), CONFIG)
    with torch.no_grad():
        for layer in adapted_layers(model):
            layer.base_layer.weight.copy_(SIZE * signs(*layer.base_layer.weight.shape))
            layer.base_layer.weight[:, 0] = LARGEST
            layer.lora_A.default.weight.copy_(signs(*layer.lora_A.default.weight.shape))
            layer.lora_A.default.weight[:, 0] = 0.0
            layer.lora_B.default.weight.zero_()
    return model


def adapted_layers(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "lora_A")]


@pytest.fixture(scope="module")
def engine(task: dict[str, Path]) -> Iterator[ChildProcess]:
    arguments = {"quantization": "fp8_per_channel"}
    engine = start_small_engine(task["model"], arguments, dtype="bfloat16", adapter_rank=CONFIG.lora_rank)
    yield engine
    engine.end()


def sampled(engine: ChildProcess, model: Any, version: int, whole: bool) -> list[Sample]:
    """Greedily, with the weights or the adapters of the model."""
    sender = WeightSender(engine_weights(model, CONFIG), 0, torch.device("cpu"), "bfloat16", BUCKET_BYTES)
    publish(sender, engine, version, whole)
    samples: list[Sample] = engine.call("generate", [GenerationRequest(one, 0) for one in PROMPTS], SHORT)
    return samples


def slope(base: Any, model: Any, before: list[Sample], after: list[Sample]) -> float:
    """How far the engine's log-probs have moved along the way from the base's to the model's, of responses
    that it sampled both times; 1: all the way."""
    moved, wanted = [], []
    for prompt, one, other in zip(PROMPTS, before, after, strict=True):
        ids = token_ids(one.parts)
        if ids == token_ids(other.parts):
            moved.append(other.parts[0].log_probs - one.parts[0].log_probs)
            wanted.append(log_probs(model, prompt, ids) - log_probs(base, prompt, ids))
    assert len(moved) > len(PROMPTS) / 4
    way = torch.cat(wanted)
    return float(torch.cat(moved) @ way / (way @ way))


def same(one: list[Sample], other: list[Sample]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.parts[0].token_ids, b.parts[0].token_ids)
        and torch.equal(a.parts[0].log_probs, b.parts[0].log_probs)
        for a, b in pairs
    )


def test_a_small_update_reaches_a_quantised_engine_as_an_adapter_alone(
    engine: ChildProcess, task: dict[str, Path]
) -> None:
    model, merged, base = (model_of(task["model"]) for _ in range(3))
    before = sampled(engine, model, 1, whole=True)
    with torch.no_grad():
        for layer, other in zip(adapted_layers(model), adapted_layers(merged), strict=True):
            layer.lora_B.default.weight.copy_(SMALL / 2 * signs(*layer.lora_B.default.weight.shape))
            other.base_layer.weight += 2 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    assert same(sampled(engine, merged, 2, whole=True), before)
    assert same(sampled(engine, base, 3, whole=True), before)
    after = sampled(engine, model, 4, whole=False)
    assert not same(after, before)
    assert 0.5 < slope(base, model, before, after) < 1.5
