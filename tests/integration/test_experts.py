"""Models with experts: a real engine and the trainer compute the same, before an update of the weights and
after it."""

from pathlib import Path

import pytest
import torch
from small_engines import start_small_engine
from small_models import log_probs, small_experts
from torch import Tensor
from transformers import PreTrainedModel, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM

from verl_rc.records.parts import token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.sender import every_name

ROUNDING = 1e-4
"""In nats: both sides compute in float32."""
PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(9)] for row in range(8)]


def gap(engine: ChildProcess, model: PreTrainedModel) -> float:
    """Largest |log-ratio| of tokens that the engine samples."""
    requests = [GenerationRequest(prompt, seed=row) for row, prompt in enumerate(PROMPTS)]
    sampling = SamplingOptions(1.0, 1.0, -1, max_tokens=16, stop_token_ids=(), ignore_eos=True)
    differences: list[Tensor] = []
    for prompt, sample in zip(PROMPTS, engine.call("generate", requests, sampling), strict=True):
        expected = log_probs(model, prompt, token_ids(sample.parts))
        differences.append(torch.cat([part.log_probs for part in sample.parts]) - expected)
    return float(torch.cat(differences).abs().max())


@pytest.mark.parametrize(
    "kind", [Qwen3MoeForCausalLM, pytest.param(Qwen2MoeForCausalLM, marks=pytest.mark.slow)]
)
def test_an_engine_computes_experts_as_the_trainer_also_after_updates(
    kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    model = small_experts(kind, 258)
    model.save_pretrained(tmp_path)
    engine = start_small_engine(tmp_path, {}, served="loaded_engine:LoadedEngine")
    try:
        assert gap(engine, model) < ROUNDING
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
            assert gap(engine, model) > 1000 * ROUNDING
            engine.call("load", dict(every_name(model)), version, "float32")
            assert gap(engine, model) < ROUNDING
    finally:
        engine.end()
