"""The trainer ranks as one: rows are split over them by token count, results come back in the order of the rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl_rc.cluster.environment import trainer_environment
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.remote import Pending, RemoteProcess, longest_busy, wait_for_all
from verl_rc.config.run import RunConfig
from verl_rc.data.batches import TokenBatch, TokenScores, TrainBatch
from verl_rc.data.microbatch import MicroBatchLimit, assign_rows
from verl_rc.distributed.mesh import RankAddress
from verl_rc.metrics import Metric
from verl_rc.ppo.mini_batches import MiniBatch, MiniBatchShare
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.transfer_group import TransferAddress


class TrainerGroup:
    """All ranks of the actor."""

    worker = "verl_rc.workers.policy_worker:PolicyWorker"
    """What every process of the group builds, as ``module:Class``; tests plant faulty ones here."""

    def __init__(self, placement: Placement, **options: Any) -> None:
        """Start one process per rank; ``build`` gives each its model."""
        environment = trainer_environment(placement.trainer_threads)
        self._ranks = [
            RemoteProcess(f"trainer rank {rank}", environment, **options) for rank in range(placement.num_ranks)
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

    def manifest(self) -> Manifest:
        """What a weight update consists of."""
        manifest: Manifest = wait_for_all([self._ranks[0].call("manifest")])[0]
        return manifest

    def free_address(self) -> tuple[str, int]:
        """Host and a free port of the sending rank's node."""
        host, port = wait_for_all([self._ranks[0].free_address()])[0]
        return host, port

    def join_transfer(self, address: TransferAddress) -> list[Pending]:
        """Open the way to the engines; answers when the engines have joined too."""
        return [self._ranks[0].call("join_transfer", address)]

    def send_weights(self) -> list[Pending]:
        """Send the current weights; the first answer is the sender's receipt."""
        return [rank.call("send_weights") for rank in self._ranks]

    def compute_log_probs(self, tokens: TokenBatch, limit: MicroBatchLimit) -> TokenScores:
        """Log-probs and entropys ``[B, R]`` of all rows under the current weights."""
        lengths = tokens.sequence_lengths.tolist()
        assigned = assign_rows(lengths, self.num_ranks, limit)
        pending, owned = [], []
        for process, micro_batches in zip(self._ranks, assigned, strict=True):
            rows, local = _localise(micro_batches)
            owned.append(rows)
            pending.append(process.call("compute_log_probs", tokens[rows or [0]], local))
        parts: list[TokenScores] = wait_for_all(pending)
        self.busy_seconds = longest_busy(pending)
        shape = tokens.responses.shape
        log_probs, entropys = torch.zeros(shape), torch.zeros(shape)
        for rows, part in zip(owned, parts, strict=True):
            if rows:
                assert part.entropys is not None
                log_probs[rows], entropys[rows] = part.log_probs, part.entropys
        return TokenScores(log_probs, entropys)

    def update(self, batch: TrainBatch, mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit) -> list[Metric]:
        """One optimizer step per mini-batch on all ranks; returns the metric records of all ranks."""
        shares = self._shares(batch.tokens.sequence_lengths, mini_batches, limit)
        pending = []
        for rank, process in enumerate(self._ranks):
            micro_batches = [rows for share in shares for rows in share[rank].micro_batches]
            rows, _ = _localise(micro_batches)
            place = {row: index for index, row in enumerate(rows)}
            local = [_with_local_rows(share[rank], place) for share in shares]
            pending.append(process.call("update", batch[rows or [0]], local))
        records: list[list[Metric]] = wait_for_all(pending)
        self.busy_seconds = longest_busy(pending)
        return [metric for of_rank in records for metric in of_rank]

    def _shares(
        self, lengths: Tensor, mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit
    ) -> list[list[MiniBatchShare]]:
        """For each mini-batch, each rank's share, in row numbers of the whole train batch."""
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

    def close(self) -> None:
        """Ask every rank to leave its process group."""
        wait_for_all([rank.call("close") for rank in self._ranks], timeout_seconds=60)


def _localise(micro_batches: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The rows named anywhere, ascending and once, and the micro-batches in terms of their places among those."""
    rows = sorted({row for batch in micro_batches for row in batch})
    place = {row: index for index, row in enumerate(rows)}
    return rows, [[place[row] for row in batch] for batch in micro_batches]


def _with_local_rows(share: MiniBatchShare, place: dict[int, int]) -> MiniBatchShare:
    local = [[place[row] for row in rows] for rows in share.micro_batches]
    return MiniBatchShare(local, share.num_tokens, share.num_sequences, share.num_loss_tokens)
