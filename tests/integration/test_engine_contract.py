"""The contract of an engine, kept by vLLM."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_contract import STEPS, EngineContract, Subject
from small_engines import BUCKET_BYTES, start_small_engine
from small_models import log_probs
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def subject(task: dict[str, Path]) -> Iterator[Subject]:
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    # As ``engine_options`` has it where updates cut: a token gets the version of the weights that sampled it.
    arguments = {"async_scheduling": False}
    engine = start_small_engine(task["model"], arguments, on_update="recompute", deterministic_steps=STEPS)
    yield Subject(engine, model, BUCKET_BYTES, log_probs)
    engine.end()


class TestVllmEngine(EngineContract):
    """In fp32."""
