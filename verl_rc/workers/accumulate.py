"""Exact totals of an update's losses and metrics over micro-batches, read from the device once."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from verl_rc.metrics import Metric, Reduction
from verl_rc.ppo.objective import Objective


class ObjectiveTotals:
    """Sums up what the micro-batches of one update report; nothing is averaged before all of it is in."""

    def __init__(self, role: str, num_updates: int) -> None:
        """``role`` (``actor`` or ``critic``) takes ``num_updates`` optimizer steps, over which losses are averaged."""
        self._role = role
        self._num_updates = max(num_updates, 1)
        self._terms: dict[str, list[Tensor]] = defaultdict(list)
        self._averages: dict[str, list[Tensor]] = defaultdict(list)
        self._grad_norms: list[float] = []

    def add(self, objective: Objective) -> None:
        """Take one micro-batch in."""
        for name, share in objective.terms.items():
            self._terms[name].append(share.detach().double())
        for name, metric in objective.averages.items():
            self._averages[name].append(torch.stack([metric.numerator.double(), metric.denominator.double()]))

    def add_grad_norm(self, grad_norm: float) -> None:
        """Take the gradient norm of one optimizer step in."""
        self._grad_norms.append(grad_norm)

    def metrics(self, is_first_rank: bool) -> list[Metric]:
        """Metric records whose reduction over ranks is exact; gradient norms are equal on all ranks and come from
        the first."""
        records = []
        sums = {name: torch.stack(shares).sum() for name, shares in self._terms.items()}
        quotients = {name: torch.stack(parts).sum(dim=0) for name, parts in self._averages.items()}
        flat = [*sums.values(), *(part for pair in quotients.values() for part in pair)]
        values = iter(torch.stack(flat).tolist() if flat else [])
        records += [Metric(name, next(values) / self._num_updates, Reduction.SUM) for name in sums]
        for name in quotients:
            numerator, denominator = next(values), next(values)
            records.append(Metric(name, numerator / denominator if denominator else 0.0, Reduction.MEAN, denominator))
        if is_first_rank:
            records += [Metric(f"{self._role}/grad_norm", norm) for norm in self._grad_norms]
            dropped = sum(not math.isfinite(norm) for norm in self._grad_norms)
            records.append(Metric(f"{self._role}/nonfinite_gradients", dropped, Reduction.SUM))
        return records
