"""The ranks of a process group, each in a process of its own."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def run_two_ranks(run_rank: Callable[..., None], *arguments: Any) -> None:
    """``run_rank(rank, *arguments)`` for ranks 0 and 1 at the same time; returns when both have ended without an error."""
    run_ranks(2, run_rank, *arguments)


def run_ranks(count: int, run_rank: Callable[..., None], *arguments: Any) -> None:
    """``run_rank(rank, *arguments)`` for ``count`` ranks at the same time; returns when all have ended without an error."""
    ranks = [get_context("spawn").Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=600)
        assert process.exitcode == 0
