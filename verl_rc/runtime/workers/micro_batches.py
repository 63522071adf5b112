"""The loops over a rank's micro-batches that all workers share, with and without gradient, and the
totals of their objectives."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from verl_rc.algorithm.ppo.objective import Objective
from verl_rc.metrics import Mean, Metric, Reduction
from verl_rc.records.batches import CriticBatch, TokenBatch, TrainBatch
from verl_rc.records.optimizer_step import OptimizerStep, Outcome
from verl_rc.records.ragged import Column, Ragged, rows_of
from verl_rc.runtime.workers.sharded_model import LearningModel


class ObjectiveTotals:
    """Sums of the metrics of all micro-batches of an update, divided once, at the end."""

    def __init__(self, role: str) -> None:
        """``role``: ``actor`` or ``critic``."""
        self._role = role
        self._terms: dict[str, Tensor] = {}
        self._averages: dict[str, Mean[Tensor]] = {}
        self.steps: list[OptimizerStep] = []
        """Every optimizer step so far."""

    def add(self, objective: Objective) -> None:
        """Add one micro-batch."""
        for name, share in objective.terms.items():
            # Detached: the graph of every micro-batch would stay in memory until the update ends.
            term = share.detach().double()
            self._terms[name] = self._terms[name] + term if name in self._terms else term
        for name, mean in objective.averages.items():
            self._averages[name] = self._averages[name] + mean if name in self._averages else mean

    @property
    def num_updates(self) -> int:
        """Optimizer steps that changed the weights so far."""
        return self._count("trained")

    def _count(self, outcome: Outcome) -> int:
        return sum(step.outcome == outcome for step in self.steps)

    def metrics(self, is_first_rank: bool) -> list[Metric]:
        """Metric records that can be reduced over ranks; losses are means over optimizer steps, without
        mini-batches that were skipped. Gradient norms are equal on all ranks and come from the first."""
        sums = [part for mean in self._averages.values() for part in (mean.total, mean.count)]
        # One copy from the device for all metrics of an update.
        flat = [*self._terms.values(), *sums]
        num_steps = max(len(self.steps), 1)
        values = iter(torch.stack([value.double() for value in flat]).tolist() if flat else [])
        records = [Metric(name, next(values) / num_steps, Reduction.SUM) for name in self._terms]
        records += [Metric(name, Mean(next(values), next(values))) for name in self._averages]
        # The norm is over the shards of all ranks, so that every rank has the same number.
        if is_first_rank:
            records += [
                Metric(f"{self._role}/grad_norm", step.grad_norm)
                for step in self.steps
                if step.outcome != "overflow"
            ]
            records.append(
                Metric(f"{self._role}/nonfinite_gradients", self._count("nonfinite"), Reduction.SUM)
            )
            if self.steps and (scale := self.steps[-1].loss_scale) is not None:
                records.append(Metric(f"{self._role}/loss_scale", scale, Reduction.LAST))
                records.append(
                    Metric(f"{self._role}/overflowed_updates", self._count("overflow"), Reduction.SUM)
                )
        return records


Batch = TypeVar("Batch", TrainBatch, CriticBatch)
Part = TypeVar("Part", TokenBatch, TrainBatch, CriticBatch)
MicroBatches = Sequence[Sequence[int]]


def score_sequences(
    tokens: Ragged[TokenBatch],
    micro_batches: MicroBatches,
    score: Callable[[TokenBatch], Sequence[Tensor]],
    device: torch.device,
) -> list[Column]:
    """The results of ``score``, each as float32 values of all response tokens, row after row, without
    gradient.

    For an empty micro-batch row 0 is scored and the result dropped: FSDP needs all ranks in every forward
    pass.
    """
    lengths = tokens.lengths["BR"]
    results: list[Column] = []
    results_by_row: list[list[Column]] = []
    with torch.no_grad():
        for rows in micro_batches:
            scores = score(on_device(tokens.padded(list(rows) or [0]), device))
            if not results:
                results = [np.zeros((lengths.sum(), *values.shape[2:]), np.float32) for values in scores]
                results_by_row = [rows_of(result, lengths) for result in results]
            for own_rows, values in zip(results_by_row, scores, strict=True):
                for row, padded in zip(rows, values.float().cpu().numpy(), strict=False):
                    own_rows[row][:] = padded[: lengths[row]]
    return results


def select_sequences(batch: Ragged[Batch], rows: Sequence[int], device: torch.device) -> Batch:
    """Rows of a batch on the device, padded to the longest of them; for an empty micro-batch row 0 with
    nothing in its masks."""
    part = on_device(batch.padded(list(rows) or [0]), device)
    if not rows:
        # An empty mask gives a loss of 0 with a graph: backward runs, and its collectives match.
        part.response_mask = torch.zeros_like(part.response_mask)
        if isinstance(part, TrainBatch):
            part.loss_mask = torch.zeros_like(part.loss_mask)
    return part


def accumulate_gradients(
    model: LearningModel,
    micro_batches: MicroBatches,
    compute_objective: Callable[[Sequence[int]], Objective],
    world_size: int,
    totals: ObjectiveTotals,
) -> None:
    """Forward and backward over this rank's micro-batches; gradients are reduced over ranks in the last one,
    or in each.

    Losses are shares of a sum, and FSDP averages gradients over ranks: each loss is multiplied by the number
    of ranks.
    """
    for index, rows in enumerate(micro_batches):
        # One reduction at the end saves transfers; until then each rank holds full gradients.
        model.set_gradient_sync(index == len(micro_batches) - 1)
        objective = compute_objective(rows)
        model.backward(objective.loss * world_size)
        totals.add(objective)


def on_device(record: Part, device: torch.device) -> Part:
    """The record on ``device``; itself when it is there."""
    return record if device.type == "cpu" else record.to(device)
