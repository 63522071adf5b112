"""A GPU's side of exact mode: names and functions of vLLM that it relies on, and what it refuses."""

import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry
from vllm.model_executor.determinism import batch_invariant, batch_invariant_configs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from verl_rc.runtime.exact import ENGINE_ARGUMENTS, EXACT_ENVIRONMENT, InexactError, gpu_kernels, trainer
from verl_rc.runtime.workers.attention import PACKED_ATTENTION


def test_vllm_takes_what_it_is_given() -> None:
    arguments = ENGINE_ARGUMENTS["cuda"]
    assert arguments.keys() <= inspect.signature(EngineArgs).parameters.keys()
    assert arguments["attention_backend"] in AttentionBackendEnum.__members__
    for module in ("activation", "rotary_embedding"):  # they register their operations
        import_module(f"vllm.model_executor.layers.{module}")
    names = {name.lstrip("-") for name in arguments["compilation_config"]["custom_ops"]} - {"all"}
    assert names <= op_registry.keys()


def test_layers_of_all_widths_are_added_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EXACT_ENVIRONMENT["cuda"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(batch_invariant, "_get_matmul_config", batch_invariant._get_matmul_config)
    tuned = next(iter(batch_invariant_configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS.values()))
    monkeypatch.setattr(batch_invariant_configs, "_TUNED_MATMUL_CONFIGS_FOR_DEVICE", tuned)
    monkeypatch.setattr(batch_invariant_configs, "_TUNED_MATMUL_CONFIGS_RESOLVED", True)
    default = {"BLOCK_SIZE_K": 8}
    layers = [(7, *shape, torch.bfloat16, default) for shape in tuned]
    assert all(batch_invariant._get_matmul_config(*layer) != default for layer in layers)
    gpu_kernels.require_vllm.__wrapped__()
    assert all(batch_invariant._get_matmul_config(*layer) == default for layer in layers)


def test_vllm_outside_its_batch_invariant_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EXACT_ENVIRONMENT["cuda"].items():
        monkeypatch.setenv(name, value)
    gpu_kernels.require_vllm.__wrapped__()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    with pytest.raises(InexactError, match=r"got .'VLLM_BATCH_INVARIANT': '0'.; unset"):
        gpu_kernels.require_vllm.__wrapped__()


def test_a_norm_that_adds_one_to_its_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class GemmaNorm(torch.nn.Module):
        eps = 1e-6

    for name, value in EXACT_ENVIRONMENT["cuda"].items():
        monkeypatch.setenv(name, value)
    model = torch.nn.ModuleDict({"norm": GemmaNorm()})
    model.config = SimpleNamespace(_attn_implementation=PACKED_ATTENTION)
    monkeypatch.setattr(trainer, "device_module", lambda part: gpu_kernels)
    with pytest.raises(InexactError, match="but norm is a GemmaNorm"):
        trainer.use_engine_operations(model, torch.float32)
