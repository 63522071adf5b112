"""An event loop that outlives the calls that are made in it, and ends with the process."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from verl_rc.runtime.distributed.event_loop import EventLoop, LateError, within


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("test")
    yield loop
    loop.close()


async def seven() -> int:
    return 7


def test_calls_share_what_belongs_to_a_loop(loop: EventLoop) -> None:
    lock = asyncio.Lock()

    async def locked() -> asyncio.AbstractEventLoop:
        async with lock:
            await asyncio.sleep(0)
            return asyncio.get_running_loop()

    calls = [loop.start(locked()) for _ in range(3)]
    assert len({call.result(120) for call in calls}) == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("no")])
def test_a_call_that_raises_leaves_the_loop_to_the_others(loop: EventLoop, error: BaseException) -> None:
    async def raise_it() -> None:
        raise error

    with pytest.raises(type(error)):
        loop.start(raise_it()).result(120)
    assert loop.start(seven()).result(120) == 7


def test_the_end_cancels_the_tasks_and_waits_for_them(loop: EventLoop) -> None:
    events = []

    async def wait() -> None:
        try:
            events.append("begun")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("ended")

    call = loop.start(wait())
    loop.start(seven()).result(120)
    loop.close()
    loop.close()
    assert events == ["begun", "ended"]
    with pytest.raises(CancelledError):
        call.result(120)


def test_a_limit_is_no_timeout_of_the_call_itself(loop: EventLoop) -> None:
    async def own() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        loop.start(within(600, own())).result(120)
    with pytest.raises(LateError):
        loop.start(within(0.01, asyncio.sleep(600))).result(120)
    assert loop.start(within(None, seven())).result(120) == 7
