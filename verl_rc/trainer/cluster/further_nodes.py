"""The processes of an engine on its nodes after the first."""

from collections.abc import Sequence
from typing import Any

from verl_rc.runtime.distributed.child_process import ProcessLostError, RemoteError
from verl_rc.runtime.rollout.engine import EngineOptions
from verl_rc.trainer.cluster.remote import Pending, RemoteProcess, first_answered, wait_for_all

_NOTICE_SECONDS = 10.0
"""Time for Ray to tell that a process has died."""


class FurtherNodes:
    """An engine's processes on further nodes, one on each; none for an engine on one node.

    Only the engine's first process answers calls. Without one of the others it would wait for ever, so the
    engine is lost with any of them.
    """

    def __init__(
        self, first: RemoteProcess, processes: Sequence[RemoteProcess] = (), host: str | None = None
    ) -> None:
        """``host``: where the first process listens for the others, default the address of its node."""
        self._first, self._processes, self._host = first, processes, host
        self._serving: list[Pending] = []
        """A call of each process that ends with it, or with its workers."""
        self._loss: str | None = None

    def __len__(self) -> int:
        """Number of further nodes."""
        return len(self._processes)

    def prepare(self, options: EngineOptions) -> list[Pending]:
        """See ``EngineGroup.prepare``."""
        return [process.prepare(options.further_worker) for process in self._processes]

    def build(self, options: EngineOptions) -> tuple[EngineOptions, list[Pending]]:
        """Start building these parts of the engine; returns the options of the first part, too, which must be
        built at the same time. Raises ``RemoteError`` when the first process has no address."""
        if not self._processes:
            return options, []
        host, port = wait_for_all([self._first.listen(self._host)])[0]
        first, *further = options.on_nodes(1 + len(self._processes), host, port)
        pairs = list(zip(self._processes, further, strict=True))
        starts = [process.build(options.further_worker, options=part) for process, part in pairs]
        self._serving = [process.call("serve") for process in self._processes]
        return first, starts

    def replace(self) -> None:
        """Kill the processes and start empty ones."""
        self._serving, self._loss = [], None
        for process in self._processes:
            process.replace()

    def end_if_lost(self, wait_seconds: float = 0.0) -> None:
        """Kill the engine's first process if one of these is lost, or is within ``wait_seconds``."""
        if not self._serving or self._loss is not None:
            return
        if ended := first_answered(self._serving, wait_seconds):
            self._loss = f"{ended[0].name} has ended, and {self._first.name} with it"
            self._first.kill()

    def explained(self, answer: Any) -> Any:
        """The first process's ``answer``, or if it is a failure that follows from a lost node, this loss."""
        if not isinstance(answer, RemoteError):
            return answer
        # Workers notice that a peer is gone before Ray tells that its process is.
        self.end_if_lost(0.0 if isinstance(answer, ProcessLostError) else _NOTICE_SECONDS)
        return answer if self._loss is None else ProcessLostError(f"{self._loss}: {answer}")
