"""An event loop beside the code that waits for it: one for the life of a process, so that what its coroutines
keep (clients, connections, locks) stays usable."""

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


class LateError(Exception):
    """A call that did not end within its limit; it was cancelled."""


class EventLoop:
    """An event loop in a daemon thread of its own, which ends with the process: its tasks are cancelled and
    may clean up."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def start(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run ``call`` in this loop; returns at once."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Cancel the tasks, wait for them for some seconds, and end the loop."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        with suppress(FutureTimeoutError):
            self.start(_end_all()).result(_CLOSE_SECONDS)
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._is_closing:
            # A task that raises one of these stops the loop, and with it all others.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._loop.close()


async def _end_all() -> None:
    """End the other tasks and the asynchronous generators of this loop, as ``asyncio.run`` does."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def within(seconds: float | None, call: Awaitable[T]) -> T:
    """The result of ``call``. Raises ``LateError`` after ``seconds``; a ``TimeoutError`` of its own is no
    such one."""
    outcomes = asyncio.gather(call, return_exceptions=True)
    try:
        (outcome,) = await asyncio.wait_for(outcomes, seconds)
    except asyncio.TimeoutError as error:
        raise LateError from error
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
