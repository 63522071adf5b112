"""The loop over a rank's micro-batches that every worker shares: without gradient, and with."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from verl_rc.data.batches import CriticBatch, TokenBatch, TrainBatch
from verl_rc.ppo.objective import Objective
from verl_rc.workers.accumulate import ObjectiveTotals
from verl_rc.workers.sharded_model import ShardedModel

Batch = TypeVar("Batch", TrainBatch, CriticBatch)
MicroBatches = Sequence[Sequence[int]]


def score_rows(
    tokens: TokenBatch, micro_batches: MicroBatches, score: Callable[[TokenBatch], Sequence[Tensor]], device: torch.device
) -> list[Tensor]:
    """What ``score`` says about each row's response tokens, float32 ``[B, R]`` each, on the CPU, without gradient.

    An empty micro-batch runs a forward on row 0 whose result is dropped: FSDP needs all ranks in every forward.
    """
    results: list[Tensor] = []
    with torch.no_grad():
        for rows in micro_batches:
            found = score(on_device(tokens[list(rows) or [0]], device))
            results = results or [torch.zeros(tokens.responses.shape) for _ in found]
            for result, part in zip(results, found, strict=True):
                if rows:
                    result[list(rows)] = part.float().cpu()
    return results


def take_rows(batch: Batch, rows: Sequence[int], device: torch.device) -> Batch:
    """Some rows of a batch on the device; for an empty micro-batch row 0 with nothing in its masks."""
    part = on_device(batch[list(rows) or [0]], device)
    if not rows:
        part.response_mask = torch.zeros_like(part.response_mask)
        if isinstance(part, TrainBatch):
            part.loss_mask = torch.zeros_like(part.loss_mask)
    return part


def accumulate_gradients(
    model: ShardedModel,
    micro_batches: MicroBatches,
    objective_of: Callable[[Sequence[int]], Objective],
    world_size: int,
    totals: ObjectiveTotals,
) -> None:
    """Forward and backward over this rank's micro-batches; gradients meet the other ranks' only in the last one.

    FSDP averages gradients over ranks, the losses are shares of a sum: hence the factor of the number of ranks.
    """
    for index, rows in enumerate(micro_batches):
        model.set_gradient_sync(index == len(micro_batches) - 1)
        objective = objective_of(rows)
        (objective.loss * world_size).backward()
        totals.add(objective)


Record = TypeVar("Record", TokenBatch, TrainBatch, CriticBatch)


def on_device(record: Record, device: torch.device) -> Record:
    """The record on ``device``; itself when it is there."""
    return record if device.type == "cpu" else record.to(device)
