"""The request to end a run after a step that is saved: by SIGTERM, or by the run itself."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl_rc.driver.announce import say

TERMINATED = 143
"""Exit code of a run that was asked to end: 128 + SIGTERM."""


class StoppedByAlertError(RuntimeError):
    """An alert ended the run; a checkpoint was written."""


class StopRequest:
    """Whether SIGTERM came, or the run itself wants to end.

    The first SIGTERM is recorded; a second one ends the process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether the run is to end, after a step that is saved."""
        self.ending = False
        """Whether it ends after this step."""
        self._signalled = False
        self.reason: str | None = None
        """Why this run itself asks to end; None: the scheduler does."""

    def decide(self) -> bool:
        """Decide whether the run ends after this step: the request may come after the moment in which the
        step could be saved."""
        self.ending = self.requested
        return self.ending

    def end_if_decided(self) -> None:
        """End the run if that was decided: ``StoppedByAlertError`` when the run itself asked for it, else
        ``SystemExit``."""
        if not self.ending:
            return
        if self.reason is not None:
            raise StoppedByAlertError(self.reason)
        raise SystemExit(TERMINATED)

    def request(self, reason: str) -> None:
        """End the run after this step, saved."""
        self.requested = True
        self.reason = reason

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM inside the context. Enter it in the main thread, after Ray has set its handler."""
        previous = signal.signal(signal.SIGTERM, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _take(self, _signal: int, _frame: FrameType | None) -> None:
        if self._signalled:
            raise SystemExit(TERMINATED)
        self.requested = self._signalled = True
        say("SIGTERM: finishing the step, saving it, ending; another SIGTERM ends at once and loses the step")
