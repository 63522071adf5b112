"""The contract of an engine, kept by the engine that is a table."""

from collections.abc import Iterator

import pytest
import torch
from bigram_engine import BigramOptions, Bigrams
from engine_contract import STEPS, EngineContract, Subject

from verl_rc.distributed.child_process import ChildProcess
from verl_rc.rollout.engine import EngineOptions

VOCABULARY = 13


def log_probs(model: Bigrams, prompt: list[int], response: list[int]) -> torch.Tensor:
    table = (model.first + model.second).detach().double().log_softmax(-1)
    pairs = zip([prompt[-1], *response[:-1]], response, strict=True)
    return torch.stack([table[before, token] for before, token in pairs])


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    options: EngineOptions = BigramOptions(deterministic_steps=STEPS)
    engine = ChildProcess(options.worker, {}, options=options)
    yield Subject(engine, Bigrams(VOCABULARY), 4 * VOCABULARY**2, log_probs)
    engine.end()


class TestBigramEngine(EngineContract):
    """In fp32."""
