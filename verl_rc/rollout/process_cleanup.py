"""Neither processes nor shared memory of an engine outlive it, however it ends."""

import ctypes
import multiprocessing
import os
import re
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = re.compile(r"(/dev/shm/(?:psm_|vllm_dist_)\S+)$", re.MULTILINE)
"""Names that Python's ``SharedMemory`` and vLLM give to memory that the processes of an engine share."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies; does nothing unless ``multiprocessing`` started it.

    The workers of an engine with tensor parallelism are its children. vLLM asks them to leave when their parent is gone, which
    one that is stopped, or waits in a collective for a peer, does not hear.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # For the kernel the parent is the thread that forked, not its process: that thread has to live on.
    # SIGKILL, since a process that waits in a collective runs no Python signal handler.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def unlink_shared_memory() -> None:
    """Remove the names of the shared memory that this process has mapped: it then lasts as long as somebody maps it.

    To be called once all processes that share it have it, for nobody finds it after that. A process that is killed cannot remove
    the names itself, and every engine lost would leave some behind.
    """
    for name in set(_SHARED_MEMORY.findall(Path("/proc/self/maps").read_text())):
        Path(name).unlink(missing_ok=True)
