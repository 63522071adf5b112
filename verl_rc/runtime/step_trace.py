"""What one process computes, operation by operation, as a Chrome trace: torch's own profiler."""

from pathlib import Path

from torch.profiler import profile, supported_activities


class StepTrace:
    """The trace of this process, while one is recorded."""

    def __init__(self) -> None:
        self._recorded: profile | None = None

    def switch(self, path: Path | None) -> None:
        """Begin a trace, unless one is being recorded; with a ``path`` end it and write it there, if there is
        one: a process that began later has none."""
        if path is None:
            if self._recorded is None:
                self._recorded = profile(activities=list(supported_activities()))
                self._recorded.start()
            return
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
