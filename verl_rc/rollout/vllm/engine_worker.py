"""The extension that vLLM loads into every worker process of an engine."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS, ChannelWiseTorchFP8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum, current_platform

from verl_rc.rollout.vllm.adapters import apply_adapter, multiply_by_one_adapter, wrap_linear_layers_alone
from verl_rc.rollout.vllm.expert_weights import pack_experts_after_updates
from verl_rc.rollout.vllm.float32_head import keep_float32_heads
from verl_rc.rollout.vllm.fp8_products import IMPLEMENTATIONS, time_fp8_products
from verl_rc.rollout.vllm.process_cleanup import die_with_parent, unlink_shared_memory
from verl_rc.rollout.vllm.receiver import WeightReceiver
from verl_rc.weight_sync.proof import LoadReceipt
from verl_rc.weight_sync.shared_bucket import device_key


class MeasuredFp8Kernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
    """vLLM's fp8 linear layer for CPUs, with the implementation of its product that is fast on this one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Raises ``SlowFp8Error``."""
        super().__init__(*arguments, **options)
        self._implementation = IMPLEMENTATIONS[time_fp8_products().implementation]

    def apply_scaled_mm(self, **arguments: Any) -> Tensor:
        """Compute vLLM's product with the chosen implementation."""
        with self._implementation():
            product: Tensor = super().apply_scaled_mm(**arguments)
        return product


class EngineWorkerExtension:
    """Methods that ``collective_rpc`` finds in every worker."""

    model_runner: Any
    weight_transfer_engine: WeightReceiver

    def weight_sync_receipt(self) -> LoadReceipt:
        """That of the last update."""
        engine = self.weight_transfer_engine
        return LoadReceipt(engine.digests, sorted(engine.expected - engine.loaded))

    def weight_sync_device(self) -> str:
        """Key of this worker's device, as trainer ranks name theirs."""
        return device_key(self.weight_transfer_engine.device)

    def apply_adapter(self) -> None:
        """Compute with the adapter that the last update brought. Raises ``RuntimeError``."""
        apply_adapter(self.model_runner.lora_manager._adapter_manager, self.weight_transfer_engine.adapter)

    def unlink_shared_memory(self) -> None:
        """See the function of that name."""
        unlink_shared_memory()

    def fp8_products(self) -> str | None:
        """How this worker computes fp8 products; None when no layer uses them."""
        return time_fp8_products().describe() if time_fp8_products.cache_info().currsize else None


# vLLM takes the first kernel of this list that fits, and its function to register one appends. The
# module is imported before the worker builds its model.
kernels = _POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
kernels[kernels.index(ChannelWiseTorchFP8ScaledMMLinearKernel)] = MeasuredFp8Kernel
keep_float32_heads()
wrap_linear_layers_alone()
multiply_by_one_adapter()
if current_platform.is_cpu():
    pack_experts_after_updates()
    # vLLM's attention uses AMX, which Linux allows to processes that have asked. oneDNN asks, unless
    # ONEDNN_MAX_CPU_ISA holds it below AMX.
    torch.cpu._init_amx()
    from verl_rc.rollout.vllm.routed_experts import return_experts_on_a_cpu  # internals of a CPU build

    return_experts_on_a_cpu()
die_with_parent()
