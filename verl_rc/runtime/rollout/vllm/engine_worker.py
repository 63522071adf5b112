"""The extension that vLLM loads into every worker process of an engine."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS, ChannelWiseTorchFP8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum, current_platform

from verl_rc.runtime.rollout.vllm.adapters import (
    apply_adapter,
    limit_adapters_to_linear_layers,
    use_single_adapter_product,
)
from verl_rc.runtime.rollout.vllm.expert_weights import pack_experts_after_updates
from verl_rc.runtime.rollout.vllm.float32_head import use_float32_heads
from verl_rc.runtime.rollout.vllm.fp8_products import IMPLEMENTATIONS, time_fp8_products
from verl_rc.runtime.rollout.vllm.node_workers import count_workers_of_node
from verl_rc.runtime.rollout.vllm.process_cleanup import die_with_parent, unlink_shared_memory
from verl_rc.runtime.rollout.vllm.receiver import WeightReceiver
from verl_rc.runtime.step_trace import StepTrace
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.shared_bucket import device_key


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
    rank: int
    weight_transfer_engine: WeightReceiver

    def weight_sync_receipt(self) -> LoadReceipt:
        """The receipt of the last update."""
        engine = self.weight_transfer_engine
        return LoadReceipt(engine.digests, engine.not_loaded, engine.unread)

    def weight_sync_device(self) -> str:
        """Key of this worker's device, as of trainer ranks."""
        return device_key(self.weight_transfer_engine.device)

    def apply_adapter(self) -> None:
        """Apply the adapter of the last update. Raises ``RuntimeError``."""
        apply_adapter(self.model_runner.lora_manager._adapter_manager, self.weight_transfer_engine.adapter)

    def switch_trace(self, path: Path | None) -> None:
        """See ``StepTrace.switch``; the workers of an engine after the first add their rank to the name."""
        if path is not None and self.rank:
            path = path.with_name(f"worker_{self.rank}_of_{path.name}")
        self.__dict__.setdefault("step_trace", StepTrace()).switch(path)

    def unlink_shared_memory(self) -> None:
        """See the function of that name."""
        unlink_shared_memory()

    def fp8_products(self) -> str | None:
        """The implementation of fp8 products; None when no layer has any."""
        return time_fp8_products().describe() if time_fp8_products.cache_info().currsize else None


EXTENSION = f"{__name__}.{EngineWorkerExtension.__name__}"
"""Its name: with tensor parallelism vLLM imports the class in processes of its own."""

# vLLM takes the first suitable kernel of this list; its function to register one appends. The worker imports
# this module before it builds its model.
kernels = _POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
kernels[kernels.index(ChannelWiseTorchFP8ScaledMMLinearKernel)] = MeasuredFp8Kernel
use_float32_heads()
limit_adapters_to_linear_layers()
use_single_adapter_product()
if current_platform.is_cpu():
    pack_experts_after_updates()
    count_workers_of_node()
    # vLLM's attention uses AMX, which a process must request from Linux. oneDNN requests it, unless
    # ONEDNN_MAX_CPU_ISA excludes AMX.
    torch.cpu._init_amx()
    from verl_rc.runtime.rollout.vllm.routed_experts import (
        return_experts_on_a_cpu,  # internals of a CPU build
    )

    return_experts_on_a_cpu()
die_with_parent()
