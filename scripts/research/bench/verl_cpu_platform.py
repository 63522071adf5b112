"""A platform "cpu" for verl: ``step_vs_verl.py`` copies this file into the copy of verl that it installs.

Calls that belong to an accelerator (synchronise, free cached memory, seed) do nothing.
"""

# ruff: noqa: D102  (verl's PlatformBase says what each method returns)

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _NoAccelerator(types.ModuleType):
    """In the place of ``torch.cuda``: what is not listed does nothing."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def memory_allocated(self, *_: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


_NO_ACCELERATOR = _NoAccelerator("no_accelerator")


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    """One device, the CPU. Ray counts it as a GPU, because verl places its workers on those."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _NO_ACCELERATOR

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # it is chosen by VERL_PLATFORM alone

    def current_device(self) -> str:
        return "cpu"  # verl moves models and batches to what this returns

    def device_count(self) -> int:
        return 1

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is nothing to do."""

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False
