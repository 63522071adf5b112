"""An engine that applies adapters beside its weights: the contract of an engine, with updates of the adapter
alone."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import GREEDY, STEPS, EngineContract, Subject
from small_engines import BUCKET_BYTES, start_small_engine
from small_models import log_probs
from transformers import AutoModelForCausalLM

from verl_rc.config.models import ModelConfig
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.runtime.weight_sync.proof import SyncProofError
from verl_rc.runtime.weight_sync.sender import WeightSender
from verl_rc.runtime.workers.lora import add_adapters, engine_weights

CPU = torch.device("cpu")
PROMPT = GenerationRequest([5, 6, 7, 8], seed=3)
ADAPTERS = ModelConfig.model_validate(
    {"path": "m", "lora_rank": 3, "lora_alpha": 6, "lora": {"merge": False}}
)


def adapted(folder: Path, config: ModelConfig = ADAPTERS) -> Any:
    """A trainer's model in float32, whose adapters do something."""
    model = add_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    move(model, seed=0)
    return model


def move(model: Any, seed: int, size: float = 0.2) -> None:
    """Other adapters, of a size that versions cannot be mistaken."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def sender_of(model: Any, dtype: str = "float32") -> WeightSender:
    return WeightSender(engine_weights(model, ADAPTERS), 0, CPU, dtype, BUCKET_BYTES)


@dataclass(frozen=True)
class Adapted(Subject):
    """Its engine has the weights; updates are of the adapter alone."""

    def sender(self) -> WeightSender:
        sender = sender_of(self.model)
        sender.manifest = sender.update_manifest(full=False)
        return sender

    def change(self, seed: int) -> Any:
        move(self.model, seed)
        return copy.deepcopy(self.model)


class Whole(Adapted):
    """Updates have all tensors."""

    def sender(self) -> WeightSender:
        return sender_of(self.model)


@pytest.fixture(scope="module")
def subject(task: dict[str, Path]) -> Iterator[Subject]:
    engine = start_small_engine(
        task["model"],
        {"async_scheduling": False, "load_format": "dummy"},
        on_update="recompute",
        deterministic_steps=STEPS,
        adapter_rank=3,
    )
    model = adapted(task["model"])
    Whole(engine, model, BUCKET_BYTES, log_probs).publish(0)
    yield Adapted(engine, model, BUCKET_BYTES, log_probs)
    engine.end()


class TestAdaptedEngine(EngineContract):
    """In fp32."""


def test_an_engine_without_weights_is_found_when_it_gets_an_adapter_alone(subject: Subject) -> None:
    """As one would be that took the place of a lost one. It has them again after a whole update."""
    subject.engine.call("forget_weights")
    with pytest.raises(SyncProofError, match=r"must be filled; untouched: .*down_proj.weight"):
        subject.publish(30)
    whole = Whole(subject.engine, subject.model, BUCKET_BYTES, log_probs)
    whole.publish(31)
    model = subject.publish(32)
    (sample,) = subject.engine.call("generate", [PROMPT], GREEDY)
    assert subject.gap(model, Request(0, PROMPT, GREEDY), sample) < 1e-5


def test_a_cached_prefix_is_not_that_of_another_adapter_where_updates_keep_the_cache(
    subject: Subject,
) -> None:
    """The adapter's name, which vLLM knows prefixes by, stays."""
    subject.engine.call("act_on_update", "keep")
    long = GenerationRequest([5 + place % 11 for place in range(70)], seed=3)
    models = []
    for version in (33, 34):
        models.append(subject.publish(version))
        (sample,) = subject.engine.call("generate", [long], GREEDY)
        assert subject.gap(models[-1], Request(0, long, GREEDY), sample) < 1e-5
    assert subject.gap(models[0], Request(0, long, GREEDY), sample) > 0.01
    subject.engine.call("act_on_update", "recompute")


def test_an_engine_with_an_adapter_keeps_its_weights_while_it_sleeps(subject: Subject) -> None:
    assert subject.engine.call("calls_around_an_update")[0] == ("sleep", (), {"level": 1})
