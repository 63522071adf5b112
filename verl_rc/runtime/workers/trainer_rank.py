"""One rank of the trainer: its part of every model that the run trains or scores with, in one process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl_rc.config.run import RunConfig
from verl_rc.records.batches import TokenBatch
from verl_rc.records.ragged import Column, Ragged, token_values
from verl_rc.runtime.checkpoint import get_random_state, set_random_state
from verl_rc.runtime.distributed.child_process import construct
from verl_rc.runtime.distributed.process_group import leave_trainer_group


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
        torch.manual_seed(config.trainer.seed)
        self._random = dict.fromkeys(workers, get_random_state())
        for role, worker in workers.items():
            with self._random_numbers_of(role):
                self._workers[role] = construct(worker, {"config": config, **arguments})

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a method of the role's worker; records among ``arguments`` are padded for it."""
        padded = [argument.padded() if isinstance(argument, Ragged) else argument for argument in arguments]
        with self._random_numbers_of(role):
            return getattr(self._workers[role], method)(*padded)

    def score(
        self, role: str, method: str, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """Call a method that returns tensors ``[B, R, …]``; returns their values at response tokens."""
        batch = tokens.padded()
        results = self.call(role, method, batch, micro_batches)
        lengths = batch.response_lengths
        return [token_values(values, lengths, range(len(lengths))) for values in results]

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
