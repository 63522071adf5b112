"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.correction.rows import LogProbs
from verl_rc.correction.totals import Extremes

SAFETY_BOUND = 20.0
"""Log-ratios (or their sums and means) are bounded by ±20 before exp: e^20 = 4.85e8."""
PROBABILITY_MARGIN = 1e-8
"""Probabilities are kept this far from 0 and 1 before their logarithms are taken."""


@dataclass(frozen=True)
class RowSums:
    """What the log-probs of rows add up to, float64 ``[B]``."""

    tokens: Tensor
    """Valid tokens: response tokens with two finite log-probs."""
    response_tokens: Tensor
    log_ratio: Tensor
    """``sum_t l_t`` over the valid tokens, unbounded."""

    @cached_property
    def real(self) -> Tensor:
        """1 for rows with valid tokens, which means over rows are taken of, and 0 for all others."""
        return self.tokens.clamp_max(1.0)

    def mean(self, sums: Tensor) -> Tensor:
        """Means over the valid tokens of each row, from their sums; 0 for rows without any."""
        return sums / self.tokens.clamp_min(1.0)

    def extremes(self, values: Tensor) -> Extremes[Tensor]:
        """Of ``values`` ``[B]`` of rows, of those that have valid tokens."""
        excluded = 1.0 - self.real.reciprocal()
        return Extremes(excluded + values, excluded - values)


@dataclass(frozen=True)
class LogRatio:
    """``l = log pi_train - log pi_rollout`` of some rows, and the statistics of tokens that rules look at.

    Every ``[B, T]`` is finite, and 0 where no token is valid, so that plain sums are masked sums. Differences have the precision
    of the log-probs (float32 at least); exponentials and sums are float64. Masks are numbers, 1 and 0: on a CPU a product takes
    a third of the time of ``where``, and nothing infinite is left that 0 would turn into NaN.
    """

    values: Tensor
    """``[B, T]``, nats, unbounded."""
    ones: Tensor
    """``[B, T]``: 1 for valid tokens, that is response tokens with two finite log-probs, and 0 elsewhere."""
    response: Tensor
    """``[B, T]``: 1 for response tokens, and 0 elsewhere."""
    train_log_probs: Tensor
    """``[B, T]``, nats, as they were given: anything may stand where no token is valid."""

    @classmethod
    def from_log_probs(cls, log_probs: LogProbs) -> "LogRatio":
        """No gradient flows through the result. What stands outside the mask is never read."""
        train, dtype = log_probs.train.detach(), log_probs.dtype
        difference = train.to(dtype) - log_probs.rollout.detach().to(dtype)
        values = _finite(difference)
        # By way of integers: a CPU turns bools to floats one by one, three times slower.
        response = log_probs.response_mask.bool().int().to(dtype)
        ones = torch.eq(values, difference, out=torch.empty_like(values)).mul_(response)
        return cls(values.mul_(ones), ones, response, train)

    @property
    def train(self) -> Tensor:
        """Log-probs of the valid tokens under the train policy, nats."""
        return _finite(self.train_log_probs.to(self.values.dtype)).mul_(self.ones)

    @cached_property
    def precise_ones(self) -> Tensor:
        """``ones`` in float64, for arithmetic with float64: operands of two types cost a conversion each time."""
        return self.ones.double()

    @cached_property
    def bounded(self) -> Tensor:
        """Log-ratios within ±``SAFETY_BOUND``."""
        return self.values.clamp(-SAFETY_BOUND, SAFETY_BOUND)

    @cached_property
    def excess(self) -> Tensor:
        """``rho - 1 = exp(bounded l) - 1``, float64, exact near 0."""
        # Log-ratios are often 1e-4 and less: exp(l) - 1 would keep few of their digits in float64 and none in float32.
        return torch.expm1(self.bounded.double())

    @property
    def k1(self) -> Tensor:
        """``-l``."""
        return -self.bounded

    @cached_property
    def k2(self) -> Tensor:
        """``l^2 / 2``."""
        return self.bounded.square().mul_(0.5)

    @cached_property
    def k3(self) -> Tensor:
        """``exp(l) - 1 - l >= 0``, float64."""
        # Near 0 both terms agree in most digits, and what rounding leaves of their difference can be negative.
        return (self.excess - self.bounded.double()).clamp_min_(0.0)

    @cached_property
    def probabilities(self) -> tuple[Tensor, Tensor]:
        """Of the sampled tokens under train and rollout, float64, kept ``PROBABILITY_MARGIN`` away from 0 and 1."""
        log_train, low, high = self.train.double(), PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN
        return log_train.exp().clamp_(low, high), (log_train - self.values).exp_().clamp_(low, high)

    @cached_property
    def tv(self) -> Tensor:
        """``|p - q|``, the total variation between the two policies with all other tokens taken together."""
        train, rollout = self.probabilities
        return (train - rollout).abs_()

    @cached_property
    def bkl(self) -> Tensor:
        """``q ln(q/p) + (1-q) ln((1-q)/(1-p))``, KL(rollout || train) of the same (DPPO, arXiv:2602.04879)."""
        train, rollout = self.probabilities
        return _binary_kl(rollout, train)

    @cached_property
    def kpop(self) -> Tensor:
        """The larger of the two directions of the binary KL (KPop, arXiv:2606.15079)."""
        train, rollout = self.probabilities
        return torch.maximum(_binary_kl(rollout, train), _binary_kl(train, rollout))

    def divergence(self, name: str) -> Tensor:
        """The statistic of a rule, by the name of its property."""
        values: Tensor = getattr(self, name)
        return values

    @cached_property
    def rows(self) -> RowSums:
        """What each row adds up to."""
        # A count is exact in float32, too, up to 16 million.
        return RowSums(self.ones.sum(dim=-1).double(), self.response.sum(dim=-1).double(), row_sum(self.values))

    def holds(self, compare: Callable[..., Tensor], values: Tensor, bound: float | Tensor) -> Tensor:
        """1 where ``compare(values, bound)``, such as ``torch.gt``, is True and 0 elsewhere, ``[B, T]``."""
        # Comparisons that write bools take three times as long on a CPU.
        return compare(values, bound, out=torch.empty_like(self.ones))

    def count(self, compare: Callable[..., Tensor], values: Tensor, bound: float) -> Tensor:
        """Of how many valid tokens in each row ``compare(values, bound)`` is True, float64 ``[B]``."""
        counts: Tensor = vecdot(self.holds(compare, values, bound), self.ones)
        return counts.double()

    def extremes(self, values: Tensor) -> Extremes[Tensor]:
        """Of finite ``values`` ``[B, T]`` over each row's valid tokens, float64 ``[B]``."""
        if values.shape[-1] == 0:  # amax of nothing is an error
            nothing = torch.full_like(self.rows.tokens, -torch.inf)
            return Extremes(nothing, nothing)
        # 0 for valid tokens and -inf elsewhere: added to something, it leaves the maximum to valid tokens.
        excluded = 1.0 - (self.precise_ones if values.dtype == torch.float64 else self.ones).reciprocal()
        return Extremes((excluded + values).amax(dim=-1).double(), (excluded - values).amax(dim=-1).double())


def row_sum(values: Tensor) -> Tensor:
    """Sum of each row ``[B, T]``, float64 ``[B]``."""
    # Thousands of float32 terms would lose the digits that tell a gap of 1e-5 from none.
    return values.sum(dim=-1, dtype=torch.float64)


def _finite(values: Tensor) -> Tensor:
    """``values`` with 0 in place of NaN and infinities; a copy."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL divergence of two coins that land on 1 with these probabilities."""
    tails = (1.0 - first) * ((1.0 - first) / (1.0 - second)).log_()
    return (first * (first / second).log_()).add_(tails).clamp_min_(0.0)
