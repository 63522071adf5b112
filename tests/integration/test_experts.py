"""Models with experts: a real engine and the trainer compute the same, before an update of the weights and
after it."""

from pathlib import Path

import pytest
import torch
from small_engines import engine_of, largest_gap
from small_models import small_experts
from transformers import PreTrainedModel, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM

from verl_rc.runtime.weight_sync.sender import every_name

ROUNDING = 1e-4
"""In nats: both sides compute in float32."""
PROMPTS = [[3 + (7 * row + 5 * place) % 250 for place in range(9)] for row in range(8)]


@pytest.mark.parametrize(
    "kind", [Qwen3MoeForCausalLM, pytest.param(Qwen2MoeForCausalLM, marks=pytest.mark.slow)]
)
def test_an_engine_computes_experts_as_the_trainer_also_after_updates(
    kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    model = small_experts(kind, 258)
    with engine_of(model, tmp_path) as engine:
        assert largest_gap(engine, model, PROMPTS) < ROUNDING
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
            assert largest_gap(engine, model, PROMPTS) > 1000 * ROUNDING
            engine.call("load", dict(every_name(model)), version, "float32")
            assert largest_gap(engine, model, PROMPTS) < ROUNDING
