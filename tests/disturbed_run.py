"""The real entry point with disturbances: ``python disturbed_run.py VICTIM SIGNAL FUNCTION CALL WHEN … -- key=value …``.

Every five words are one. VICTIM is ``driver``, ``actor`` or ``engine`` (rank or engine 0). FUNCTION is ``module:name`` or
``module:Class.name`` in the driver, CALL its number from 1, WHEN ``before`` or ``after`` the call, or seconds from its beginning.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from verl_rc import main_ppo
from verl_rc.cluster.watchdog import WATCHDOG, identity_of

NAMES = {"actor": "actor rank 0", "engine": "rollout engine 0"}


def send(victim: str, name: str) -> None:
    if victim == "driver":
        pid = os.getpid()
    else:
        (process,) = [process for process in WATCHDOG._processes if process.name == NAMES[victim]]
        pid = identity_of(process).pid
    sys.stderr.write(f"disturbance: {name} to the {victim}\n")
    sys.stderr.flush()
    os.kill(pid, getattr(signal, name))


def disturb(function: str, call: int, when: str, strike: Callable[[], None]) -> None:
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    place: Any = importlib.import_module(module)
    for owner in owners:
        place = getattr(place, owner)
    original, calls = getattr(place, name), 0

    def disturbed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return original(*arguments, **keywords)
        if when == "before":
            strike()
        elif when != "after":
            threading.Timer(float(when), strike).start()
        result = original(*arguments, **keywords)
        if when == "after":
            strike()
        return result

    setattr(place, name, disturbed)


if __name__ == "__main__":
    words, overrides = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    for start in range(0, len(words), 5):
        victim, signal_name, function, call, when = words[start : start + 5]
        disturb(function, int(call), when, partial(send, victim, signal_name))
    sys.argv = [main_ppo.__file__, *overrides]
    main_ppo.main()
