"""Mergeable statistics: sums, extremes and a histogram that add up over micro-batches and ranks without loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class CorrectionStatistics:
    """What was measured of some rows; the statistics of a batch are the merged ones of its parts."""

    sums: Mapping[str, Tensor]
    """float64 scalars that add up."""
    maxima: Mapping[str, Tensor]
    """float64 scalars of which the largest counts; minima are stored negated."""

    def merge(self, other: "CorrectionStatistics") -> "CorrectionStatistics":
        """Statistics of both parts together. Both must have been measured with one configuration."""
        if set(self.sums) != set(other.sums) or set(self.maxima) != set(other.maxima):
            raise ValueError("statistics can be merged only when one configuration measured both; their names differ.")
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return CorrectionStatistics(sums, {name: torch.maximum(v, other.maxima[name]) for name, v in self.maxima.items()})

    def to_vectors(self) -> tuple[Tensor, Tensor]:
        """All sums and all maxima as float64 vectors in the order of their names, for one all-reduce each."""
        return _stack(self.sums), _stack(self.maxima)

    def with_vectors(self, sums: Tensor, maxima: Tensor) -> "CorrectionStatistics":
        """The same names with the numbers of ``to_vectors`` after a reduction."""
        return CorrectionStatistics(
            dict(zip(sorted(self.sums), sums, strict=True)), dict(zip(sorted(self.maxima), maxima, strict=True))
        )

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima as Python numbers, read from the device in one copy."""
        sums, maxima = self.to_vectors()
        values = torch.cat([sums, maxima]).tolist()
        names = sorted(self.sums)
        return dict(zip(names, values, strict=False)), dict(zip(sorted(self.maxima), values[len(names) :], strict=True))


def _stack(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([values[name].double() for name in sorted(values)])


@dataclass
class StatisticsBuilder:
    """Collects sums and extremes of columns."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def count(self, name: str, where: Tensor) -> None:
        """Number of True entries."""
        self.sums[name] = where.sum().double()

    def total(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Sum over the True positions."""
        self.sums[name] = torch.where(mask, values, 0.0).double().sum()

    def moments(self, name: str, values: Tensor, mask: Tensor, centre: float = 0.0) -> None:
        """Sums of ``x - centre`` and of its square: a mean and a variance without cancellation near ``centre``."""
        centred = torch.where(mask, values - centre, 0.0).double()
        self.sums[f"{name}.sum"] = centred.sum()
        self.sums[f"{name}.square"] = centred.square().sum()

    def extremes(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Largest and (negated) smallest value; -inf when the mask is empty."""
        wide = values.double()
        infinity = torch.full((), -torch.inf, dtype=torch.float64, device=wide.device)
        self.maxima[f"{name}.max"] = torch.where(mask, wide, infinity).amax() if wide.numel() else infinity
        self.maxima[f"{name}.negated_min"] = torch.where(mask, -wide, infinity).amax() if wide.numel() else infinity

    def build(self) -> CorrectionStatistics:
        """The finished record."""
        return CorrectionStatistics(self.sums, self.maxima)
