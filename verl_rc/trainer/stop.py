"""The request to end a run after a step that is saved: by SIGTERM, or by the run itself."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from verl_rc.config.processes import kill_descendants
from verl_rc.trainer.log import log

TERMINATED = 143
"""Exit code of a run that was asked to end: 128 + SIGTERM."""


@contextmanager
def ending_on_sigterm(give_back: Callable[[], None]) -> Iterator[None]:
    """End the process at once on SIGTERM inside the context: ``give_back`` what it holds, end every process
    that it has started. No exception is raised, which an import or a call of Ray would take for its own."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        log("SIGTERM while the run starts: ending; no step is done")
        give_back()
        kill_descendants()
        os._exit(TERMINATED)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class StoppedByAlertError(RuntimeError):
    """An alert ended the run; a checkpoint was written."""


class StopRequest:
    """A request to end the run, by SIGTERM or by the run itself.

    A request counts for a step once ``accept`` has taken it up. The first SIGTERM is a request; a second one
    ends the process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether the run is to end, after a step that is saved."""
        self.accepted = False
        """Whether the run ends after this step."""
        self.reason: str | None = None
        """The run's own reason to end. None if the scheduler asks."""
        self._received_sigterm = False

    def request(self, reason: str) -> None:
        """Ask for the end of the run after this step, saved."""
        self.requested = True
        self.reason = reason

    def accept(self) -> None:
        """Take up the request, if there is one: the run ends after this step. Call it while the step can
        still be saved; a later request waits for the next step."""
        self.accepted = self.requested

    def end_if_accepted(self) -> None:
        """End the run if a request was accepted: ``StoppedByAlertError`` when the run itself asked, else
        ``SystemExit``."""
        if not self.accepted:
            return
        if self.reason is not None:
            raise StoppedByAlertError(self.reason)
        raise SystemExit(TERMINATED)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM inside the context. Enter it in the main thread."""
        previous = signal.signal(signal.SIGTERM, self._handle_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _handle_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        if self._received_sigterm:
            raise SystemExit(TERMINATED)
        self.requested = self._received_sigterm = True
        log("SIGTERM: finishing the step, saving it, ending; another SIGTERM ends at once and loses the step")
