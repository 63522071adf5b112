"""The real entry point with disturbances: ``python disturbed_run.py VICTIM SIGNAL FUNCTION CALL WHEN … --
key=value …``.

Every five words are one. VICTIM is ``driver``, ``actor`` or ``engine`` (rank or engine 0; others as
``engine:1``), or ``part:2`` (the process of an engine on its second node). FUNCTION is ``module:name`` or
``module:Class.name`` in the driver, CALL its number from 1, WHEN ``before`` or ``after`` the call, or seconds
from its beginning. With FUNCTION ``clock`` the signal comes every CALL seconds, and WHEN is not read. The
environment variable ``ACTOR_WORKER`` names another class for the actor's ranks.
"""

import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from verl_rc import main_ppo
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.cluster.watchdog import WATCHDOG, identity_of

ROLES = {
    "actor": r"actor\b.* rank",
    "engine": "rollout engine",
    "part": r"rollout engine \d+ on its node",
}
"""Beginnings of the names of processes; other roles may live in the actor's."""


def send(victim: str, name: str) -> None:
    if victim == "driver":
        pid = os.getpid()
    else:
        role, _, number = victim.partition(":")
        name_of_process = re.compile(f"{ROLES[role]} {number or 0}")
        (process,) = [process for process in WATCHDOG._processes if name_of_process.fullmatch(process.name)]
        pid = identity_of(process).pid
    sys.stderr.write(f"disturbance: {name} to the {victim}\n")
    sys.stderr.flush()
    os.kill(pid, getattr(signal, name))


def disturb_by_the_clock(seconds: float, strike: Callable[[], None]) -> None:
    """A victim that is not there, because it was struck before, is left out."""

    def strike_for_ever() -> None:
        while True:
            time.sleep(seconds)
            with suppress(ValueError, ProcessLookupError):
                strike()

    threading.Thread(target=strike_for_ever, daemon=True).start()


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
    if "ACTOR_WORKER" in os.environ:
        ActorGroup.worker = os.environ["ACTOR_WORKER"]
    words, overrides = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    for start in range(0, len(words), 5):
        victim, signal_name, function, call, when = words[start : start + 5]
        strike = partial(send, victim, signal_name)
        if function == "clock":
            disturb_by_the_clock(float(call), strike)
        else:
            disturb(function, int(call), when, strike)
    sys.argv = [main_ppo.__file__, *overrides]
    main_ppo.main()
