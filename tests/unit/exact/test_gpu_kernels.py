"""A GPU's side of exact mode as far as a CPU can tell: vLLM's kernels in Triton's interpreter, and names."""

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry
from vllm.model_executor.determinism import batch_invariant, batch_invariant_configs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from verl_rc.exact import ENGINE_ARGUMENTS, EXACT_ENVIRONMENT, InexactError, gpu_kernels, trainer


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("model"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_attention_is_that_of_a_float64_loop_alone_in_company_and_decoding(found: Any) -> None:
    attention = found["attention"]
    assert attention.pop("error") < 1e-5
    assert attention == {"alone": True, "decoded": True}


def test_layers_are_those_of_the_engine_with_gradients_of_the_trainer(found: Any) -> None:
    layers = found["layers"]
    assert layers.pop("frequencies") == "meta"  # where the engine builds its model
    assert layers == {"engine": True, "gradients": True, "norm": True, "sum": True}


def test_log_probs_of_a_model_do_not_depend_on_the_batch(found: Any) -> None:
    model = found["model"]
    assert model["alone"]
    assert not model["same"]  # as the ordinary ones to the bit: they would be those
    assert model["error"] < 1e-4
    assert model["gradient error"] < 1e-3


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

    model = torch.nn.ModuleDict({"norm": GemmaNorm()})
    monkeypatch.setattr(trainer, "device_module", lambda part: gpu_kernels)
    with pytest.raises(InexactError, match="but norm is a GemmaNorm"):
        trainer.use_engine_operations(model, torch.float32)
