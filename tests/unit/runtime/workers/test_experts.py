"""Models with experts: how many there are, what of them a token takes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from small_models import VOCABULARY, small_experts, small_model_config, small_run_config
from transformers import PreTrainedModel, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM

from verl_rc.plan.memory import ModelShape
from verl_rc.runtime.workers.experts import experts_problem, idle_share, num_experts
from verl_rc.runtime.workers.supported_models import unsupported_model

ADAPTERS = "actor_rollout_ref.model.lora_rank=2"
REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
TARGETS = "actor_rollout_ref.model.target_modules"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    small_experts(Qwen3MoeForCausalLM, VOCABULARY).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", [Qwen3MoeForCausalLM, Qwen2MoeForCausalLM])
def test_a_token_takes_two_of_five(kind: type[PreTrainedModel]) -> None:
    config = small_experts(kind, VOCABULARY).config
    assert (num_experts(config), idle_share(config)) == (5, 0.6)


def test_a_dense_model_has_none() -> None:
    config = small_model_config(VOCABULARY)
    assert (num_experts(config), idle_share(config)) == (0, 0.0)


def test_weights_that_a_token_does_not_take_are_counted(folder: Path) -> None:
    """Three of five experts in each of two layers, of three matrices of 64 x 32."""
    assert ModelShape.from_model_folder(str(folder)).idle_parameters == 2 * 3 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor_rollout_ref.rollout.quantization=fp8_per_channel"], "no quantised kernel for them on a CPU"),
        (["actor_rollout_ref.exact=True"], "which exact mode does not cover"),
        ([ADAPTERS], "name the linear layers"),
        ([REPLAY], None),
        ([ADAPTERS, f"{TARGETS}=[q_proj,o_proj]"], None),
        (
            [ADAPTERS, f"{TARGETS}=[q_proj]", "actor_rollout_ref.model.lora.merge=False"],
            "adapters in an engine are not proven: pass actor_rollout_ref.model.lora.merge=True",
        ),
        ([], None),
    ],
)
def test_what_is_refused_of_a_model_with_experts(
    folder: Path, overrides: list[str], said: str | None
) -> None:
    problem = unsupported_model(small_run_config(folder, *overrides), str(folder), trust_remote_code=False)
    assert problem is None if said is None else said in (problem or "")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "of qwen2 and has 0"),
        ({"num_experts": 300, "model_type": "qwen3_moe"}, "of qwen3_moe and has 300"),
        ({"num_experts": 8, "model_type": "glm4_moe"}, "of glm4_moe and has 8"),
        ({"num_experts": 256, "model_type": "qwen3_moe"}, None),
    ],
)
def test_which_experts_can_be_replayed(tmp_path: Path, changed: dict[str, Any], said: str | None) -> None:
    config = small_run_config(tmp_path, REPLAY)
    source = small_model_config(VOCABULARY)
    for name, value in changed.items():
        setattr(source, name, value)
    problem = experts_problem(config, str(tmp_path), source)
    assert problem is None if said is None else said in (problem or "")
