"""The ranks of one role as one: rows are split over them by token count, results come back in the order of the rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_rc.cluster.environment import trainer_environment
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.remote import Pending, RemoteProcess, longest_busy, wait_for_all
from verl_rc.config.run import RunConfig
from verl_rc.data.batches import CriticBatch, TokenBatch, TrainBatch
from verl_rc.data.microbatch import MicroBatchLimit, assign_rows
from verl_rc.distributed.mesh import RankAddress
from verl_rc.ppo.mini_batches import MiniBatch, MiniBatchShare


class RankGroup:
    """All ranks of a role that computes with the trainer's models."""

    role = ""
    """What messages call a process of the group."""
    worker = ""
    """What every process of the group builds, as ``module:Class``; tests plant faulty ones here."""

    def __init__(self, placement: Placement) -> None:
        """Start one process per rank; ``build`` gives each its model."""
        environment = trainer_environment(placement.trainer_threads, placement.one_node)
        self._ranks = [
            RemoteProcess(f"{self.role} rank {rank}", environment, **place.options())
            for rank, place in enumerate(placement.rank_places)
        ]
        self.busy_seconds = 0.0
        """Seconds the slowest rank itself computed in the last call."""

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return len(self._ranks)

    def build(self, config: RunConfig, total_steps: int) -> list[Pending]:
        """Load and shard the model on every rank; returns at once."""
        (host, port) = wait_for_all([self._ranks[0].free_address()])[0]
        addresses = [RankAddress(rank, self.num_ranks, host, port) for rank in range(self.num_ranks)]
        return [
            process.build(self.worker, config=config, address=address, total_steps=total_steps)
            for process, address in zip(self._ranks, addresses, strict=True)
        ]

    def visible_devices(self) -> list[str]:
        """The GPU each rank was given, as ``CUDA_VISIBLE_DEVICES`` names it; empty strings on a CPU."""
        devices: list[str] = wait_for_all([rank.visible_devices() for rank in self._ranks])
        return devices

    def save(self, folder: Path) -> list[Pending]:
        """Write the group's part of a checkpoint."""
        return [rank.call("save", folder) for rank in self._ranks]

    def load(self, folder: Path) -> list[Pending]:
        """Go on from a checkpoint, which may have been written by another number of ranks."""
        return [rank.call("load", folder) for rank in self._ranks]

    def close(self) -> None:
        """Ask every rank to leave its process group."""
        wait_for_all([rank.call("close") for rank in self._ranks], timeout_seconds=60)

    def score(self, method: str, tokens: TokenBatch, limit: MicroBatchLimit) -> list[Tensor]:
        """What ``method`` of the worker says about all rows: float32 ``[B, R]`` each, in the order of the rows."""
        assigned = assign_rows(tokens.sequence_lengths.tolist(), self.num_ranks, limit)
        pending, owned = [], []
        for process, micro_batches in zip(self._ranks, assigned, strict=True):
            rows, local = _localise(micro_batches)
            owned.append(rows)
            pending.append(process.call(method, tokens[rows or [0]], local))
        parts: list[list[Tensor]] = wait_for_all(pending)
        self.busy_seconds = longest_busy(pending)
        results = [torch.zeros(tokens.responses.shape) for _ in parts[0]]
        for rows, part in zip(owned, parts, strict=True):
            for result, values in zip(results, part, strict=True):
                if rows:
                    result[rows] = values
        return results

    def split(
        self, batch: TrainBatch | CriticBatch, mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit
    ) -> list[tuple[TrainBatch | CriticBatch, list[MiniBatchShare]]]:
        """For each rank the rows it needs, and its share of every mini-batch in terms of these rows."""
        shares = self._shares(batch.tokens.sequence_lengths, mini_batches, limit)
        parts = []
        for rank in range(self.num_ranks):
            rows = sorted({row for share in shares for part in share[rank].micro_batches for row in part})
            place = {row: index for index, row in enumerate(rows)}
            parts.append((batch[rows or [0]], [_with_local_rows(share[rank], place) for share in shares]))
        return parts

    def call_update(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Every rank's ``update`` with its own arguments; their answers in order of rank."""
        pending = [rank.call("update", *own) for rank, own in zip(self._ranks, arguments, strict=True)]
        answers = wait_for_all(pending)
        self.busy_seconds = longest_busy(pending)
        return answers

    def _shares(
        self, lengths: Tensor, mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit
    ) -> list[list[MiniBatchShare]]:
        """For each mini-batch, each rank's share, in row numbers of the whole batch."""
        shares = []
        for mini in mini_batches:
            assigned = assign_rows(lengths[mini.rows].tolist(), self.num_ranks, limit)
            counts = (mini.num_tokens, mini.num_sequences, mini.num_loss_tokens)
            shares.append(
                [
                    MiniBatchShare([[mini.rows[index] for index in rows] for rows in micro_batches], *counts)
                    for micro_batches in assigned
                ]
            )
        return shares


def _localise(micro_batches: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The rows named anywhere, ascending and once, and the micro-batches in terms of their places among those."""
    rows = sorted({row for batch in micro_batches for row in batch})
    place = {row: index for index, row in enumerate(rows)}
    return rows, [[place[row] for row in batch] for batch in micro_batches]


def _with_local_rows(share: MiniBatchShare, place: dict[int, int]) -> MiniBatchShare:
    local = [[place[row] for row in rows] for rows in share.micro_batches]
    return MiniBatchShare(local, share.num_tokens, share.num_sequences, share.num_loss_tokens)
