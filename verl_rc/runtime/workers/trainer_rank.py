"""One rank of the trainer: its part of every model that the run trains or scores with, in one process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from verl_rc.config.run import RunConfig
from verl_rc.runtime.checkpoint import get_random_state, set_random_state
from verl_rc.runtime.distributed.child_process import construct
from verl_rc.runtime.distributed.process_group import leave_trainer_group
from verl_rc.runtime.step_trace import StepTrace


class TrainerRank:
    """The workers of all roles on one rank: they share the imports, the process group and, on a GPU, CUDA's
    context.

    Each role has a separate random state: dropout and adapters of one role do not change the random numbers
    of another.
    """

    def __init__(self, workers: Mapping[str, str], config: RunConfig, **arguments: Any) -> None:
        """Build the worker of every role (``module:Class`` by role) with ``arguments``; collective, in
        order."""
        self._workers: dict[str, Any] = {}
        self._trace = StepTrace()
        torch.manual_seed(config.trainer.seed)
        self._random = dict.fromkeys(workers, get_random_state())
        for role, worker in workers.items():
            which = {"role": role} if role in config.frozen_policies else {}
            with self._random_numbers_of(role):
                self._workers[role] = construct(worker, {"config": config, **which, **arguments})

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a method of the role's worker."""
        with self._random_numbers_of(role), record_function(f"{role}.{method}"):
            return getattr(self._workers[role], method)(*arguments)

    def refresh_reference(self) -> None:
        """Give the reference policy the actor's weights."""
        self._workers["reference"].model.copy_from(self._workers["actor"].model)

    def switch_trace(self, path: Path | None) -> None:
        """See ``StepTrace.switch``."""
        self._trace.switch(path)

    def close(self) -> None:
        """Leave the process group."""
        leave_trainer_group()

    @contextmanager
    def _random_numbers_of(self, role: str) -> Iterator[None]:
        set_random_state(self._random[role])
        try:
            yield
        finally:
            self._random[role] = get_random_state()
