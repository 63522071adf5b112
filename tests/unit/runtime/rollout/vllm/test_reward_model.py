"""What vLLM is built with to serve a reward model, and which models it does not serve."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import write_small_model
from small_reward_models import write_reward_model
from transformers import AutoTokenizer

from verl_rc.config.task import RewardModelConfig
from verl_rc.runtime.rollout.vllm import reward_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_reward_model(tmp_path / "judge")


def built(monkeypatch: pytest.MonkeyPatch, folder: Path, pooling: str = "LAST", **fields: Any) -> Any:
    """The arguments of ``LLM``."""
    arguments: dict[str, Any] = {}
    pooler = SimpleNamespace(pooler_config=SimpleNamespace(seq_pooling_type=pooling))
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=pooler))

    def llm(**given: Any) -> Any:
        arguments.update(given)
        return SimpleNamespace(llm_engine=engine)

    monkeypatch.setattr(reward_model, "LLM", llm)
    monkeypatch.setattr(reward_model, "release_shared_memory", lambda _: None)
    rollout = {"name": "vllm", **fields.pop("rollout", {})}
    reward_model.VllmRewardModel(
        RewardModelConfig.model_validate(
            {"enable": True, "model_path": str(folder), "rollout": rollout, **fields}
        )
    )
    return arguments


def test_an_engine_is_as_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    on_cpu = built(monkeypatch, folder)
    assert (on_cpu["max_model_len"], on_cpu["dtype"], on_cpu["tensor_parallel_size"]) == (64, "float32", 1)
    assert on_cpu["kv_cache_memory_bytes"] == 256 << 20
    assert "gpu_memory_utilization" not in on_cpu
    two = {"tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.8}
    on_gpus = built(monkeypatch, folder, rollout=two, n_gpus_per_node=2, max_length=9, dtype="bfloat16")
    assert (on_gpus["max_model_len"], on_gpus["dtype"], on_gpus["tensor_parallel_size"]) == (9, "bfloat16", 2)
    assert on_gpus["gpu_memory_utilization"] == 0.8
    assert "kv_cache_memory_bytes" not in on_gpus


def test_other_models_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    """vLLM itself would serve the first with a head from memory that nobody wrote."""
    policy = write_small_model(tmp_path / "policy")
    AutoTokenizer.from_pretrained(folder).save_pretrained(policy)
    with pytest.raises(ValueError, match=r"must be a trained .* lacks the weights \['score.weight'\]"):
        built(monkeypatch, policy)
    with pytest.raises(ValueError, match=r"score at the last token, .* has CLS; write rollout.name=null"):
        built(monkeypatch, folder, pooling="CLS")
