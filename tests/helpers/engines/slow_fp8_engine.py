"""An engine on a CPU whose oneDNN has no fp8 kernel but its reference implementation: AMX int8 without AMX
fp16."""

import time
from typing import Any

import torch
from torch import Tensor

from verl_rc.records.parts import Part
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.vllm import fp8_products
from verl_rc.runtime.rollout.vllm.engine import VllmEngine
from verl_rc.runtime.rollout.vllm.engine_worker import MeasuredFp8Kernel
from verl_rc.runtime.rollout.vllm.sampler import VllmSampler

SECONDS_PER_MULTIPLICATION = 180e-9
"""Measured on such a CPU: 4.5 s for 256 x 192 x 512."""
fast_product = torch._scaled_mm
slow_calls: list[torch.Size] = []


def slow_product(left: Tensor, right: Tensor, **arguments: Any) -> Tensor:
    """``torch._scaled_mm`` of that CPU: slow as long as oneDNN may be used."""
    if torch._C._get_mkldnn_enabled():
        slow_calls.append(left.shape)
        time.sleep(SECONDS_PER_MULTIPLICATION * left.shape[0] * left.shape[1] * right.shape[1])
    return fast_product(left, right, **arguments)


class SlowFp8Engine(VllmEngine):
    """The engine, on that CPU."""

    def __init__(self, **arguments: Any) -> None:
        torch._scaled_mm = slow_product
        self.kernels: list[MeasuredFp8Kernel] = []
        initialise = MeasuredFp8Kernel.__init__

        def remembered(kernel: MeasuredFp8Kernel, *given: Any, **options: Any) -> None:
            initialise(kernel, *given, **options)
            self.kernels.append(kernel)

        MeasuredFp8Kernel.__init__ = remembered
        super().__init__(**arguments)

    def log_probs(self, requests: list[GenerationRequest], options: SamplingOptions) -> tuple[Tensor, int]:
        """Rollout log-probs, and how many slow products they took."""
        before = len(slow_calls)
        samples = self.generate(requests, options)
        log_probs = [part.log_probs for sample in samples for part in sample.parts if isinstance(part, Part)]
        return torch.stack(log_probs), len(slow_calls) - before

    def become_fast(self) -> None:
        """From now on: a CPU on which PyTorch's choice is fast, and taken."""
        torch._scaled_mm = fast_product
        assert self.kernels
        for kernel in self.kernels:
            kernel._implementation = fp8_products.IMPLEMENTATIONS["PyTorch's choice"]
        self._loop.call(lambda sampler: sampler.reset_prefix_cache())

    def rename_scales(self, name: str) -> None:
        """As other kinds of quantisation call them."""

        def rename(sampler: VllmSampler) -> None:
            for module in sampler.weight_receiver().model.modules():
                if hasattr(module, "weight_scale"):
                    module.register_parameter(
                        name, torch.nn.Parameter(module.weight_scale.data, requires_grad=False)
                    )

        self._loop.call(rename)
