"""Ends an engine's processes and frees its shared memory, also after a kill."""

import multiprocessing
import re
from pathlib import Path

from verl_rc.runtime.distributed.child_process import die_with

_SHARED_MEMORY = re.compile(r"(/dev/shm/(?:psm_|vllm_dist_)\S+)$", re.MULTILINE)
"""Names that Python's ``SharedMemory`` and vLLM give to memory that the processes of an engine share."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies; does nothing unless
    ``multiprocessing`` started it.

    The workers of an engine with tensor parallelism are its children. vLLM asks them to exit when their
    parent is gone, but a worker that is stopped, or waits in a collective, does not react.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)


def unlink_shared_memory() -> None:
    """Unlink the shared memory that this process has mapped; the kernel frees it when the last process unmaps
    it.

    Call it after all processes that share the memory have opened it. A killed process could not unlink it,
    and every lost engine would leave some in /dev/shm.
    """
    for name in set(_SHARED_MEMORY.findall(Path("/proc/self/maps").read_text())):
        Path(name).unlink(missing_ok=True)
