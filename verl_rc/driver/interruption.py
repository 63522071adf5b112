"""Ending a run when its scheduler asks: the step in progress is finished and saved first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl_rc.driver.announce import say

TERMINATED = 143
"""Exit code of a run that was asked to end: 128 + SIGTERM."""


class StopRequest:
    """Whether SIGTERM came. The first one is taken note of; a second one ends the process where it stands."""

    def __init__(self) -> None:
        self.came = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM is ours inside. To be entered in the main thread, after Ray has set a handler of its own."""
        previous = signal.signal(signal.SIGTERM, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _take(self, _signal: int, _frame: FrameType | None) -> None:
        if self.came:
            raise SystemExit(TERMINATED)
        self.came = True
        say("SIGTERM: finishing the step, saving it, ending; another SIGTERM ends at once and loses the step")
