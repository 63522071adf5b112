"""The ranks of a process group, each in a process of its own."""

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

SERVER = get_context("forkserver")
"""Ranks are forks of one process, which has imported what takes seconds and holds nothing else."""
SERVER.set_forkserver_preload(
    ["verl_rc.runtime.workers.trainer_rank", "verl_rc.runtime.workers.policy_worker"]
)
_PORTS = iter(random.SystemRandom().sample(range(20000, 32768), 12768))


def run_two_ranks(run_rank: Callable[..., None], *arguments: Any) -> None:
    """``run_rank(rank, *arguments)`` for ranks 0 and 1 at the same time; returns when both have ended without
    an error."""
    run_ranks(2, run_rank, *arguments)


def run_ranks(count: int, run_rank: Callable[..., None], *arguments: Any) -> None:
    """``run_rank(rank, *arguments)`` for ``count`` ranks at the same time; returns when all have ended
    without an error."""
    ranks = [SERVER.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=600)
        assert process.exitcode == 0


def free_port() -> int:
    """A free port, another one at each call.

    It is from 20000 to 32767, where neither takes it before its use: outgoing connections get ports above,
    Ray's workers below.
    """
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
