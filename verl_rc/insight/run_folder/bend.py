"""Whether the gap is a straight line over log-probs, over all records of a run. The gap of a temperature is.

At another temperature ``l = kappa log pi + c``. c depends on the prefix alone: it is ``kappa H`` and
cumulants of log pi, the first of them ``kappa^2 V / 2``. So l has no part along ``u^2 - V``, whose mean
behind any prefix is 0, like the mean of u. Where V is not known, tokens behind equal prefixes tell the same.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from verl_rc.insight.run_folder.shared_prefixes import behind_prefixes
from verl_rc.insight.run_folder.signature_sums import ComparedTokens
from verl_rc.records.token_records.token_record import Array


@dataclass(frozen=True)
class Bend:
    """The bend of the gap over log-probs."""

    z: float
    """The coefficient of the bend, divided by its standard error over rows."""
    share: float
    """Share of the squared gap that the bend explains beside the slope."""


@dataclass
class BendSums:
    """Sums for a least-squares fit of l, by row or by prompt; the last regressor is the bend."""

    squares: list[Array] = field(default_factory=list)
    """``[rows, k, k]``: products of the regressors."""
    products: list[Array] = field(default_factory=list)
    """``[rows, k]``: products of the regressors with l."""
    squared_gap: float = 0.0
    """Sum of ``l^2``."""

    def add(self, tokens: ComparedTokens) -> None:
        """Add a record. One without entropies, varentropies and equal prefixes adds nothing."""
        fields = tokens.record.tokens
        if {"entropy", "varentropy"} <= fields.keys():
            u, v = tokens.old_log_probs + tokens.finite("entropy"), tokens.finite("varentropy")
            columns = (u, v, u**2 - v, tokens.log_ratios, tokens.row_numbers)
            *regressors, log_ratios, groups = (column[tokens.is_compared] for column in columns)
        else:
            log_probs, squares, log_ratios, groups = behind_prefixes(
                tokens, tokens.old_log_probs, tokens.old_log_probs**2, tokens.log_ratios
            )
            regressors = [log_probs, np.zeros_like(log_probs), squares]
        count = len(tokens.record.lengths)

        def by_group(values: Array) -> Array:
            return np.bincount(groups, values, count)

        self.squares.append(
            np.stack([np.stack([by_group(a * b) for b in regressors], -1) for a in regressors], -1)
        )
        self.products.append(np.stack([by_group(a * log_ratios) for a in regressors], -1))
        self.squared_gap += float(log_ratios @ log_ratios)

    def bend(self) -> Bend | None:
        """The bend over all records; None where no record could tell, or all log-ratios are 0."""
        if not self.squares or not self.squared_gap:
            return None
        squares, products = np.concatenate(self.squares), np.concatenate(self.products)
        inverse = np.linalg.pinv(squares.sum(0), hermitian=True)
        slopes = inverse @ products.sum(0)
        if not inverse[-1, -1]:
            return None
        errors = (products - squares @ slopes) @ inverse[-1]
        error = math.sqrt(float(errors @ errors))
        explained = float(slopes[-1] ** 2 / inverse[-1, -1])
        return Bend(float(slopes[-1]) / error if error else 0.0, explained / self.squared_gap)
