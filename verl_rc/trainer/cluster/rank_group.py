"""The group of all ranks of one role: splits rows by token count and returns results in the order of the
rows.

Neighbouring ranks may share rows (sequence parallelism): they are given the same ones, and the first of them
answers for all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.records.batches import CriticBatch, Timed, TokenBatch, TrainBatch
from verl_rc.records.microbatch import MicroBatches, MicroBatchLimit, assign_rows
from verl_rc.records.ragged import Column, Ragged, rows_of
from verl_rc.records.shared_prefixes import prefixes_of_rows
from verl_rc.runtime.workers.model_flops import ModelFlops
from verl_rc.trainer.cluster.rank_processes import RankProcesses
from verl_rc.trainer.cluster.remote import Pending, shared, wait_for_all, wait_timed

Learned = TypeVar("Learned", TrainBatch, CriticBatch)


class RankGroup:
    """All ranks of a role that computes with the trainer's models."""

    role = ""
    """Name of the role in messages."""
    replays = False
    """Whether the model takes the experts that are recorded beside tokens."""
    worker = ""
    """The class of the role's part of every process, as ``module:Class``; tests replace it by faulty ones."""

    def __init__(self, processes: RankProcesses) -> None:
        """A part of ``processes``, which load the models of all roles."""
        self.processes = processes
        self.ranks_per_share = processes.sharing[self.role]
        """Ranks that share the tokens of their rows."""
        self._shares_prefixes, self._balances = processes.shares_prefixes, processes.balances
        self._ranks = processes.ranks_of(self.role)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def num_shares(self) -> int:
        """Number of shares that rows are split into."""
        return self.num_ranks // self.ranks_per_share

    def count_flops(self) -> ModelFlops:
        """The FLOPs of the model and of the first rank's device."""
        flops: ModelFlops = wait_for_all([self._ranks[0].call("count_flops")])[0]
        return flops

    def save(self, folder: Path) -> list[Pending]:
        """Write the group's part of a checkpoint, or with ``checkpoint.async_save`` copy it and write in the
        background."""
        return [rank.call("save", folder) for rank in self._ranks]

    def has_saved(self, wait: bool) -> list[Pending]:
        """Whether all ranks have written their part; with ``wait``, block until they have."""
        return [rank.call("has_saved", wait) for rank in self._ranks]

    def load(self, folder: Path) -> list[Pending]:
        """Load a checkpoint, which may have been written by another number of ranks."""
        return [rank.call("load", folder) for rank in self._ranks]

    def score(
        self,
        method: str,
        tokens: Ragged[TokenBatch],
        limit: MicroBatchLimit,
    ) -> Timed[list[Tensor]]:
        """Call ``method`` of the workers on all rows; returns float32 columns ``[N, …]``."""
        pending, shares = [], []
        [assigned] = self._assign(tokens, [range(len(tokens))], limit)
        for share, micro_batches in enumerate(assigned):
            place = _places(micro_batches)
            own_tokens = tokens.take(list(place) or [0])
            shares.append((place, own_tokens.lengths["BR"]))
            pending += self._call_share(share, method, own_tokens, _localised(micro_batches, place))
        answers = wait_timed(pending)
        by_row: list[list[Column]] = [[np.zeros(0)] * len(tokens) for _ in answers.result[0]]
        for (rows, lengths), columns in zip(shares, self._one_of_each_share(answers.result), strict=True):
            for result, column in zip(by_row, columns, strict=True):
                # A share of no rows has row 0, whose values do not count.
                for row, values in zip(rows, rows_of(column, lengths), strict=False):
                    result[row] = values
        return Timed([torch.from_numpy(np.concatenate(rows)) for rows in by_row], answers.busy_seconds)

    def score_one(
        self,
        method: str,
        tokens: Ragged[TokenBatch],
        limit: MicroBatchLimit,
    ) -> Timed[Tensor]:
        """``score`` for a method with a single result, ``[N]``."""
        return self.score(method, tokens, limit).map(lambda results: results[0])

    def split(
        self, batch: Ragged[Learned], mini_batches: Sequence[MiniBatch], limit: MicroBatchLimit
    ) -> Iterator[tuple[Ragged[Learned], list[MiniBatch]]]:
        """Yield for each share its rows, and its part of every mini-batch as indices into these rows."""
        assigned = self._assign(batch.tokens, [mini.rows for mini in mini_batches], limit)
        shares = [
            [replace(mini, micro_batches=micro_batches) for micro_batches in shares_of_rows]
            for mini, shares_of_rows in zip(mini_batches, assigned, strict=True)
        ]
        for number in range(self.num_shares):
            mini_batch_shares = [share[number] for share in shares]
            place = _places([share.rows for share in mini_batch_shares])
            local = [
                replace(share, micro_batches=_localised(share.micro_batches, place))
                for share in mini_batch_shares
            ]
            yield batch.take(list(place) or [0]), local

    def call_update(self, arguments: Iterable[tuple[Any, ...]]) -> Timed[list[Any]]:
        """Call ``update`` of all ranks of each share with the share's arguments; returns the shares' answers
        in their order."""
        pending = [
            call for share, own in enumerate(arguments) for call in self._call_share(share, "update", *own)
        ]
        return wait_timed(pending).map(self._one_of_each_share)

    def _call_share(self, share: int, method: str, rows: Ragged[Any], *arguments: Any) -> list[Pending]:
        """Call ``method`` of all ranks of a share with its ``rows``."""
        ranks = self._ranks[share * self.ranks_per_share : (share + 1) * self.ranks_per_share]
        sent = shared(rows) if len(ranks) > 1 else rows
        return [rank.call(method, sent, *arguments) for rank in ranks]

    def _one_of_each_share(self, answers: list[Any]) -> list[Any]:
        """Answers of the first rank of each share: those of the others repeat them, and must not count
        twice."""
        return answers[:: self.ranks_per_share]

    def _assign(
        self, tokens: Ragged[TokenBatch], mini_batches: Sequence[Sequence[int]], limit: MicroBatchLimit
    ) -> list[list[MicroBatches]]:
        """The micro-batches of each share of each mini-batch, which is given by its rows."""
        lengths, limit = tokens.sequence_lengths.tolist(), limit.shared_by(self.ranks_per_share)
        prefixes = prefixes_of_rows(tokens, self.replays) if self._shares_prefixes else None
        assigned = []
        for rows in mini_batches:
            shares = assign_rows(
                [lengths[row] for row in rows],
                self.num_shares,
                limit,
                None if prefixes is None else prefixes.of(rows),
                self._balances,
            )
            assigned.append([[[rows[place] for place in part] for part in share] for share in shares])
        return assigned


def _places(micro_batches: Sequence[Sequence[int]]) -> dict[int, int]:
    """The distinct rows of all micro-batches in ascending order, each with its index among them."""
    rows = sorted({row for batch in micro_batches for row in batch})
    return {row: place for place, row in enumerate(rows)}


def _localised(micro_batches: Sequence[Sequence[int]], place: Mapping[int, int]) -> list[list[int]]:
    """The micro-batches as indices ``place`` into the rank's rows."""
    return [[place[row] for row in rows] for rows in micro_batches]
