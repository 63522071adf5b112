"""LoRA in the actor: without its adapters it is the model it was made from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import make_tokens, scored, small_run_config
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM
from two_processes import free_port

from verl_rc.config.models import ModelConfig
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.weight_sync.manifest import is_adapter
from verl_rc.runtime.weight_sync.sender import every_name
from verl_rc.runtime.weight_sync.survival import EngineRounding
from verl_rc.runtime.workers.lora import MergedWeights, add_adapters, engine_weights, linear_weights
from verl_rc.runtime.workers.policy_worker import PolicyWorker

MODEL = "actor_rollout_ref.model"


def test_the_reference_is_the_base_model_however_far_the_adapters_went(model_folder: Path) -> None:
    config = small_run_config(
        model_folder, f"{MODEL}.lora_rank=2", "actor_rollout_ref.actor.use_kl_loss=True"
    )
    tokens = make_tokens([3, 6], [7, 2])
    worker = PolicyWorker(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)
    try:
        for name, parameter in worker.model.module.named_parameters():
            if ".lora_" in name:
                torch.nn.init.constant_(parameter.detach().to_local(), 0.2)  # type: ignore[attr-defined]
        (reference,) = scored(worker.compute_reference_log_probs, tokens, [[0], [1]])
        current = scored(worker.compute_log_probs, tokens, [[0, 1]])[0]
    finally:
        worker.close()
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    for row, (prompt, response) in enumerate([(3, 7), (6, 2)]):
        ids = torch.cat([tokens.prompts[row, -prompt:], tokens.responses[row, :response]])
        with torch.no_grad():
            log_probs = log_softmax(base(ids[None]).logits[0].double(), dim=-1)
        expected = [float(log_probs[place - 1, ids[place]]) for place in range(prompt, prompt + response)]
        torch.testing.assert_close(
            reference[row, :response].double(), torch.tensor(expected).double(), atol=1e-5, rtol=0
        )
        assert (reference[row, response:] == 0).all()
        assert (current[row, :response] - reference[row, :response]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("given", "adapted"),
    [
        ({"target_modules": ["q_proj", "up_proj"]}, {"q_proj", "up_proj"}),
        (
            {"exclude_modules": ["o_proj", "gate_proj", "down_proj"]},
            {"q_proj", "k_proj", "v_proj", "up_proj"},
        ),
    ],
)
def test_adapters_lie_where_the_keys_say_and_weigh_alpha_over_rank(
    given: dict[str, list[str]], adapted: set[str], model_folder: Path
) -> None:
    config = ModelConfig.model_validate({"path": "m", "lora_rank": 2, "lora_alpha": 6, **given})
    model = add_adapters(AutoModelForCausalLM.from_pretrained(model_folder), config)
    layers = {
        name.rpartition(".")[2]: module for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    assert layers.keys() == adapted
    assert {scale for layer in layers.values() for scale in layer.scaling.values()} == {3.0}


@pytest.fixture
def saved(model_folder: Path, tmp_path: Path) -> Path:
    """Adapters that PEFT has trained and saved."""
    torch.manual_seed(3)
    given = LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), given)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_training_starts_from_adapters_that_peft_saved(model_folder: Path, saved: Path) -> None:
    config = ModelConfig.model_validate({"path": "m", "lora_adapter_path": str(saved)})
    assert (config.lora_rank, config.lora_alpha) == (3, 9)
    assert sorted(config.target_modules) == ["q_proj", "up_proj"]
    assert ModelConfig.model_validate(config.model_dump()) == config
    given = {"path": "m", "lora_adapter_path": str(saved), "target_modules": ["up_proj", "q_proj"]}
    assert ModelConfig.model_validate(given).lora_rank == 3
    base, ids = AutoModelForCausalLM.from_pretrained(model_folder), torch.arange(7)[None]
    plain = base(ids).logits
    model = add_adapters(base, config)
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), saved)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=0, rtol=0)
        assert (model(ids).logits - plain).abs().max() > 0.1
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"use_dora": True}, {}, r"plain LoRA adapters, but .* has use_dora=True; merge them"),
        ({"peft_type": "IA3"}, {}, "has peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, {}, "has init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 1]]}, {}, "has layer_replication="),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
        ({}, {"lora_rank": 4}, "lora_rank must be that of lora_adapter_path, 3, got 4"),
        ({}, {"lora_adapter_path": "nowhere"}, "must be a folder of LoRA adapters that PEFT saved"),
    ],
)
def test_other_adapters_are_refused(
    changes: dict[str, Any], given: dict[str, Any], message: str, saved: Path
) -> None:
    file = saved / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({"path": "m", "lora_adapter_path": str(saved), **given})


def test_adapters_of_another_model_are_refused(model_folder: Path, saved: Path) -> None:
    file = saved / "adapter_config.json"
    file.write_text(file.read_text().replace("up_proj", "gate_proj"))
    config = ModelConfig.model_validate({"path": "m", "lora_adapter_path": str(saved)})
    with pytest.raises(ValueError, match=r"lacks .*gate_proj.* and has .*up_proj"):
        add_adapters(AutoModelForCausalLM.from_pretrained(model_folder), config)


def test_adapters_that_engines_would_not_get_are_refused(model_folder: Path) -> None:
    """An embedding's adapter has other names than those that are merged and sent."""
    config = ModelConfig(path="m", lora_rank=2, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ValueError, match=r"must name linear layers, .* also takes .*embed_tokens"):
        add_adapters(AutoModelForCausalLM.from_pretrained(model_folder), config)


def adapted(folder: Path, config: ModelConfig) -> tuple[Any, dict[str, Tensor], Tensor, Tensor]:
    """A model with adapters, the weights it had before, and the factors of one adapter."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: weight.detach().clone() for name, weight in every_name(plain)}
    model = add_adapters(plain, config)
    first, second = torch.linspace(-1, 1, 64).view(2, 32), torch.linspace(0, 1, 96).view(48, 2)
    up = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
    with torch.no_grad():
        up.lora_A.default.weight.copy_(first)  # type: ignore[union-attr]
        up.lora_B.default.weight.copy_(second)  # type: ignore[union-attr]
    return model, before, first, second


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}, {"lora_rank": 2, "lora": {"merge": False}}], ids=str)
def test_engines_get_a_tied_head_under_its_own_name(model_folder: Path, lora: dict[str, Any]) -> None:
    config = ModelConfig.model_validate({"path": "m", "target_modules": ["q_proj"], **lora})
    weights = engine_weights(add_adapters(AutoModelForCausalLM.from_pretrained(model_folder), config), config)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    assert set(names) <= weights.shapes().keys()
    embedding, head = weights.gather(names, torch.float32)
    assert torch.equal(embedding, head)


def test_adapters_travel_beside_weights_that_stay_and_their_second_factors_have_the_scale(
    model_folder: Path,
) -> None:
    config = ModelConfig.model_validate(
        {
            "path": "m",
            "lora_rank": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj", "up_proj"],
            "lora": {"merge": False},
        }
    )
    model, before, first, second = adapted(model_folder, config)
    weights = engine_weights(model, config)
    layers = ("self_attn.q_proj", "mlp.up_proj")
    factors = [
        f"model.layers.{layer}.{part}.lora_{factor}.weight"
        for layer in (0, 1)
        for part in layers
        for factor in "AB"
    ]
    assert list(weights.shapes()) == [*before, *factors]
    assert weights.constant() == before.keys()
    assert all(map(is_adapter, factors))
    assert not any(map(is_adapter, before))
    names = [factors[-2], "model.layers.1.mlp.up_proj.weight", factors[-1]]
    assert [weights.shapes()[name] for name in names] == [(2, 32), (48, 32), (48, 2)]
    one, base, two = weights.gather(names, torch.bfloat16)
    assert torch.equal(one, first.bfloat16())
    assert torch.equal(base, before[names[1]].bfloat16())
    assert torch.equal(two, (1.5 * second).bfloat16())  # rounded once
    trained = dict(weights.trained())
    assert list(trained) == factors
    assert torch.equal(trained[names[2]], 1.5 * second)
    rounding = EngineRounding(torch.bfloat16, "fp8_per_channel", linear_weights(model))
    assert torch.equal(rounding(names[2], trained[names[2]]), two.float())  # no adapter is quantised


def test_the_weights_that_training_changes_are_those_with_adapters_merged(model_folder: Path) -> None:
    config = ModelConfig.model_validate(
        {"path": "m", "lora_rank": 2, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}
    )
    model, before, first, second = adapted(model_folder, config)
    weights = MergedWeights(model, config)
    trained = dict(weights.trained())
    assert trained.keys() == {name for name in before if "q_proj.weight" in name or "up_proj" in name}
    changed = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(trained.pop(changed), before[changed] + 3 * second @ first)
    assert all(torch.equal(weight, before[name]) for name, weight in trained.items())
    linear = {name for name in before if name.endswith("_proj.weight")}
    found = linear_weights(model)
    assert found & before.keys() == linear
    assert linear_weights(AutoModelForCausalLM.from_pretrained(model_folder)) == linear
