"""vLLM's kernels for GPUs on a CPU, in Triton's interpreter: for a process that imports it before vLLM."""
# ruff: noqa: E402  (Triton and vLLM read their environment when they are imported)

import os
from typing import Any
from unittest.mock import patch

from verl_rc.runtime.exact import EXACT_ENVIRONMENT

os.environ |= {**EXACT_ENVIRONMENT["cuda"], "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from vllm.platforms import current_platform

assert current_platform.is_cpu()
with patch("vllm.platforms.vllm_version_matches_substr", lambda _: False):
    import vllm.triton_utils  # noqa: F401  (the CPU build does without Triton)

from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers import utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from verl_rc.runtime.exact import gpu_engine, gpu_kernels, operations, trainer
from verl_rc.runtime.exact.captured_engine import CapturingEngine
from verl_rc.runtime.rollout.vllm.options import VllmOptions

batch_invariant.num_compute_units = lambda *_: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)
gpu_kernels.DEVICE = "cpu"
trainer.device_module = lambda part: gpu_kernels
operations._ROWS = (1, 17)  # more take a minute


class Engine(CapturingEngine):
    """With the operations of a GPU, in the runner of vLLM's CPU build."""

    def __init__(self, options: VllmOptions) -> None:
        gpu_engine.use_trainer_operations()
        # What vLLM does itself on a GPU in its batch-invariant mode, which it refuses on a CPU.
        os.environ["VLLM_BATCH_INVARIANT"] = "0"
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("aten::_log_softmax", batch_invariant._log_softmax_batch_invariant, "CPU")
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
        )
        utils.dispatch_cpu_unquantized_gemm = _multiply_as_on_a_gpu
        gpu_engine._GpuRmsNorm.forward_cpu = gpu_engine._GpuRmsNorm.forward_cuda
        super().__init__(options)


def _multiply_as_on_a_gpu(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = gpu_kernels.linear
