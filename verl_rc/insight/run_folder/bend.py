"""Whether the gap is a straight line over log-probs, as that of a temperature is, over all records of a run.

At another temperature ``l = kappa log pi + c``, where c depends on the tokens before alone: ``kappa H`` and
cumulants of log pi, the first of them ``kappa^2 V / 2``. So l has no further part along ``u^2 - V``, whose
mean behind any prefix is 0 as that of u is. Where V is not known, tokens behind equal prefixes tell the same.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from verl_rc.data.token_record import Array
from verl_rc.insight.run_folder.shared_prefixes import behind_prefixes
from verl_rc.insight.run_folder.signature_sums import ComparedTokens


@dataclass(frozen=True)
class Bend:
    """How much the gap bends."""

    z: float
    """In standard errors over rows."""
    share: float
    """Of the squared gap, what the bend explains beside the slope."""


@dataclass
class BendSums:
    """Sums of every row, or of every prompt, for a least-squares fit of l; the last regressor is the bend."""

    squares: list[Array] = field(default_factory=list)
    """``[rows, k, k]``: products of the regressors."""
    products: list[Array] = field(default_factory=list)
    """``[rows, k]``: those with l."""
    squared_gap: float = 0.0
    """Sum of ``l^2``."""

    def add(self, tokens: ComparedTokens) -> None:
        """Take in a record; one without entropies, varentropies and equal prefixes tells nothing."""
        fields = tokens.record.tokens
        if {"entropy", "varentropy"} <= fields.keys():
            u, v = tokens.train + tokens.finite("entropy"), tokens.finite("varentropy")
            regressors, logs, groups = np.stack([u, v, u**2 - v])[:, tokens.valid], tokens.logs, tokens.rows
            logs, groups = logs[tokens.valid], groups[tokens.valid]
        else:
            train, square, logs, groups = behind_prefixes(tokens, tokens.train, tokens.train**2, tokens.logs)
            regressors = np.stack([train, np.zeros_like(train), square])
        count = len(tokens.record.lengths)

        def by_group(values: Array) -> Array:
            return np.bincount(groups, values, count)

        self.squares.append(
            np.stack([np.stack([by_group(a * b) for b in regressors], -1) for a in regressors], -1)
        )
        self.products.append(np.stack([by_group(a * logs) for a in regressors], -1))
        self.squared_gap += float(logs @ logs)

    def bend(self) -> Bend | None:
        """None where nothing was told, or nothing differs."""
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
