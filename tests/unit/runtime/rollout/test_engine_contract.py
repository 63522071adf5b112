"""The contract of an engine, kept by the engine that is a table."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from bigram_engine import BigramOptions, Bigrams
from engine_contract import STEPS, EngineContract, Subject

from verl_rc.records.parts import Part, Sample
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.engine import EngineOptions, Request
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions

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


@pytest.mark.parametrize(("own_limit", "limit"), [(None, 2), (0, 2), (1, 5), (2, 5)])
def test_a_response_without_room_for_a_token_is_refused_before_an_engine_gets_it(
    own_limit: int | None, limit: int
) -> None:
    written = Part(torch.tensor([4, 5], dtype=torch.int32), torch.tensor([-1.0, -2.0]), version=3)
    request = GenerationRequest([1], seed=0, max_tokens=own_limit, so_far=Sample(0, [written]))
    options = SamplingOptions(1.0, 1.0, -1, limit, (0,))
    allowed = limit if own_limit is None else own_limit
    message = f"request 7 has 2 tokens and a limit of {allowed}; raise max_tokens"
    with pytest.raises(ValueError, match=message):
        Request(7, request, options)
    assert Request(7, replace(request, max_tokens=3), options).number == 7
