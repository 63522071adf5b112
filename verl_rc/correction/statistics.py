"""Mergeable statistics: sums, extremes and histograms that add up over micro-batches and ranks without loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.diagnostics import correction_metrics
from verl_rc.correction.moments import Numbers


@dataclass(frozen=True)
class CorrectionStatistics:
    """What was measured of some rows; the statistics of a batch are the merged ones of its parts.

    To merge over ranks: all-reduce the two vectors of ``to_vectors`` with SUM and with MAX, then ``with_vectors``.
    """

    sums: Tensor
    """float64 ``[S]``, in the order of ``sum_names``; they add up."""
    maxima: Tensor
    """float64 ``[M]``, in the order of ``maximum_names``; the largest counts, minima are stored negated, -inf: nothing seen."""
    histogram: Tensor
    """float64 ``[3, bins]`` counts of log-ratios (tokens, row sums, row means) with full diagnostics, else ``[0, bins]``."""
    sum_names: tuple[str, ...]
    """What each sum is."""
    maximum_names: tuple[str, ...]
    """What each maximum is."""

    @classmethod
    def from_columns(cls, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor], histogram: Tensor) -> "CorrectionStatistics":
        """Statistics of per-row columns ``[B]``: float64 to be summed, and those of which the largest counts."""
        nothing = torch.full((len(maxima), 1), -torch.inf, dtype=torch.float64, device=histogram.device)
        return cls(
            sums=torch.stack(list(sums.values())).sum(dim=1),
            maxima=torch.cat([torch.stack(list(maxima.values())), nothing], dim=1).amax(dim=1),
            histogram=histogram,
            sum_names=tuple(sums),
            maximum_names=tuple(maxima),
        )

    def merge(self, other: "CorrectionStatistics") -> "CorrectionStatistics":
        """Statistics of both parts together. Raises ``ValueError`` when different configurations measured them."""
        if (self.sum_names, self.maximum_names) != (other.sum_names, other.maximum_names):
            names = set(self.sum_names + self.maximum_names) ^ set(other.sum_names + other.maximum_names)
            raise ValueError(f"statistics merge only when one configuration measured both; only one has {sorted(names)}")
        return self.with_tensors(
            self.sums + other.sums, torch.maximum(self.maxima, other.maxima), self.histogram + other.histogram
        )

    def with_tensors(self, sums: Tensor, maxima: Tensor, histogram: Tensor) -> "CorrectionStatistics":
        """The same names with other numbers, such as those of an all-reduce."""
        return replace(self, sums=sums, maxima=maxima, histogram=histogram)

    def to_vectors(self) -> tuple[Tensor, Tensor]:
        """Everything that adds up (sums, then the histogram), and everything of which the largest counts; float64."""
        return torch.cat([self.sums, self.histogram.flatten()]), self.maxima

    def with_vectors(self, added: Tensor, maxima: Tensor) -> "CorrectionStatistics":
        """The same names with the numbers of ``to_vectors`` after a reduction."""
        count = self.sums.numel()
        return self.with_tensors(added[:count], maxima, added[count:].view_as(self.histogram))

    def sum_of(self, name: str) -> Tensor:
        """One sum as a float64 scalar, still on its device."""
        return self.sums[self.sum_names.index(name)]

    def numbers(self) -> Numbers:
        """Everything as Python numbers, read from the device in one copy."""
        flat = torch.cat([self.sums, self.maxima, self.histogram.flatten()]).tolist()
        first, second = len(self.sum_names), len(self.sum_names) + len(self.maximum_names)
        bins = self.histogram.shape[1]
        return Numbers(
            sums=dict(zip(self.sum_names, flat[:first], strict=True)),
            maxima=dict(zip(self.maximum_names, flat[first:second], strict=True)),
            histograms=[flat[start : start + bins] for start in range(second, len(flat), bins)],
        )

    def metrics(self, config: RolloutCorrectionConfig) -> dict[str, float]:
        """``rollout_corr/*`` of the rows measured, by name; one copy from the device."""
        return correction_metrics(self.numbers(), config)
