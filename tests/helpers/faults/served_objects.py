"""An object for a process that is called, and that fails, dies or hangs when asked to.

Imports no torch, which would take most of a process's time.
"""

import atexit
import gc
import os
import signal
import subprocess
import sys
import threading
import time
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

    def start_daemon(self, path: str) -> int:
        """A process of a session of its own, whose parent has ended: no group of processes holds it."""
        program = f"import os, time; open({path!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
        subprocess.run(["setsid", "--fork", sys.executable, "-c", program], check=True)
        while not (Path(path).exists() and Path(path).read_text()):
            time.sleep(0.01)
        return int(Path(path).read_text())

    def write_into_connection(self, data: bytes) -> None:
        os.write(int(sys.argv[1]), data)
        time.sleep(3600)

    def stop(self) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()

    def variables(self) -> dict[str, str]:
        return dict(os.environ)

    def write_at_exit(self, path: str) -> None:
        atexit.register(Path(path).write_text, self._name)
