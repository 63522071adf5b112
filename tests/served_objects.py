"""An object for a process that is called, and that fails, dies or hangs when asked to.

Imports no torch, which would take most of a process's time.
"""

import atexit
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WITH = os.environ.get("SERVED_WITH")


class Served:
    def __init__(self, name: str) -> None:
        self._name = name

    def greeting(self) -> str:
        return f"{self._name}: {WITH}"

    def pid(self) -> int:
        return os.getpid()

    def garbage_collection(self) -> tuple[bool, int]:
        """Whether it is on, and how many objects it leaves alone."""
        return gc.isenabled(), gc.get_freeze_count()

    def doubled(self, values: "Tensor") -> "Tensor":
        return 2 * values

    def complain(self, key: str) -> None:
        raise KeyError(key)

    def leave(self, status: int) -> None:
        os._exit(status)

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self) -> None:
        while True:
            pass

    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid

    def write_at_exit(self, path: str) -> None:
        atexit.register(Path(path).write_text, self._name)
