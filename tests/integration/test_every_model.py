"""Every architecture that a recipe names, and the other way to share embeddings, trains three real steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, FULL, RECURRENT
from real_runs import metrics_of, train
from small_runs import make_task, run_overrides, share_of_digits
from small_vision import use_torchvision
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "qwen3_moe": EXPERTS,
    "glm4_moe": FULL["glm4_moe"],
    **{f"{family} with windows": further for family, further in FAMILIES.items()},
    **{f"{family} with states": further for family, further in RECURRENT.items()},
}
"""Kinds, with what their configuration has beside the sizes."""
ROUNDING = {"float32": 1e-3, "bfloat16": 0.02}
"""In nats, by the engine's precision; that of the trainer is float32."""
IN_BFLOAT16 = [
    *("actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.enable_prefix_caching=False"),
]


ATTENTION = "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]"
ALL_LINEAR = "actor_rollout_ref.model.target_modules=all-linear"
WITH_ADAPTERS = {"gpt_oss with windows": ATTENTION, "qwen3_5_text with states": ALL_LINEAR}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains(kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(kind, tied, [], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_ADAPTERS)
def test_adapters_of_a_model_train(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged for the engine, on layers with sinks and with a state."""
    adapters = ["actor_rollout_ref.model.lora_rank=4", WITH_ADAPTERS[kind]]
    trains(kind, False, adapters, tmp_path, monkeypatch)


def trains(
    kind: str, tied: bool, further: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three real steps."""
    dtype = "bfloat16" if kind.endswith("states") else "float32"
    if kind.startswith("qwen3_5"):
        use_torchvision(monkeypatch)
    task = make_task(tmp_path)
    given: dict[str, Any] = json.loads((task["model"] / "config.json").read_text())
    same = {name: given[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(
        kind.split()[0], **{**SIZES, **same, **KINDS[kind]}, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(task["model"])
    folder = tmp_path / "run"
    steps = ["trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    steps += [*(IN_BFLOAT16 if dtype == "bfloat16" else []), *further]
    run = train([*run_overrides(task, folder), *steps, share_of_digits(tmp_path)])
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = metrics_of(folder)
    for step in (1, 2, 3):
        assert metrics[step]["actor/grad_norm"] > 0
        assert abs(metrics[step]["rollout_corr/k3_kl"]) < ROUNDING[dtype]
        assert metrics[step]["rollout_corr/log_ppl_abs_diff"] < ROUNDING[dtype]
