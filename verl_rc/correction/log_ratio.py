"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verl_rc.correction.chunks import RowChunk

SAFETY_BOUND = 20.0
"""Log-ratios (or their sums and means) are bounded by ±20 before exp: e^20 = 4.85e8."""

PROBABILITY_MARGIN = 1e-8
"""Probabilities are kept this far from 0 and 1 before their logarithms are taken."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the sampled tokens under two policies. Raises ``ValueError`` unless all three have one shape ``[B, T]``."""

    train: Tensor
    """Under the train policy, nats."""
    rollout: Tensor
    """Under the rollout policy, nats."""
    response_mask: Tensor
    """True (or not 0) for tokens the policy produced."""

    def __post_init__(self) -> None:
        if not self.train.shape == self.rollout.shape == self.response_mask.shape or self.train.ndim != 2:
            raise ValueError(
                "train_log_probs, rollout_log_probs and response_mask must have one shape [B, T]; got "
                f"{list(self.train.shape)}, {list(self.rollout.shape)} and {list(self.response_mask.shape)}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights: the more precise of the two, float32 at least."""
        return _common_dtype(self.train, self.rollout)

    def ratio(self, chunk: RowChunk) -> "LogRatio":
        """The log-ratios of some rows."""
        return log_ratio(chunk.of(self.train), chunk.of(self.rollout), chunk.of(self.response_mask))


@dataclass(frozen=True)
class LogRatio:
    """``l = log pi_train - log pi_rollout`` of some rows, and what is derived from it; what is dear to compute is kept.

    Everything ``[B, T]`` is finite, and 0 where no token is valid: plain sums over it are masked sums. Differences, bounds and
    counts have the precision of the log-probs (float32 at least), exponentials and sums are float64. Selecting by a mask costs
    a CPU several times what arithmetic does, so masks take part as numbers.
    """

    values: Tensor
    """``[B, T]``, nats, unbounded."""
    ones: Tensor
    """``[B, T]``: 1 for ``valid`` tokens, response tokens with two finite log-probs, and 0 elsewhere."""
    response_mask: Tensor
    """bool ``[B, T]``: tokens the policy produced."""
    response: Tensor
    """The same as numbers, ``[B, T]``."""
    train_log_probs: Tensor
    """``[B, T]``, nats, as they were given: anything may stand where no token is valid."""

    @property
    def train(self) -> Tensor:
        """Log-probs of the valid tokens under the train policy, ``[B, T]``, nats."""
        return finite(self.train_log_probs.to(self.values.dtype)).mul_(self.ones)

    @property
    def valid(self) -> Tensor:
        """bool ``[B, T]``: response tokens with two finite log-probs."""
        return self.ones.bool()

    @cached_property
    def _exclusion(self) -> Tensor:
        """0 for valid tokens and -inf elsewhere, ``[B, T]``: added to something, it leaves its maxima to valid tokens."""
        return 1.0 - self.ones.reciprocal()

    @cached_property
    def bounded(self) -> Tensor:
        """Token log-ratios within ±``SAFETY_BOUND``, ``[B, T]``."""
        return self.values.clamp(-SAFETY_BOUND, SAFETY_BOUND)

    @cached_property
    def precise(self) -> Tensor:
        """``bounded`` in float64, ``[B, T]``."""
        return self.bounded.double()

    @cached_property
    def excess(self) -> Tensor:
        """``rho - 1 = exp(bounded l) - 1``, float64 ``[B, T]``, exact near 0."""
        return torch.expm1(self.precise)

    @cached_property
    def k1(self) -> Tensor:
        """``-l``, ``[B, T]``."""
        return -self.bounded

    @cached_property
    def k2(self) -> Tensor:
        """``l^2 / 2``, ``[B, T]``."""
        return self.bounded.square().mul_(0.5)

    @cached_property
    def k3(self) -> Tensor:
        """``exp(l) - 1 - l >= 0``, float64 ``[B, T]``."""
        return (self.excess - self.precise).clamp_min_(0.0)

    @cached_property
    def probabilities(self) -> tuple[Tensor, Tensor]:
        """Of the sampled tokens under train and rollout, float64 ``[B, T]``, kept ``PROBABILITY_MARGIN`` away from 0 and 1."""
        log_train = self.train.double()
        train, rollout = log_train.exp(), (log_train - self.values).exp_()
        low, high = PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN
        return train.clamp_(low, high), rollout.clamp_(low, high)

    @cached_property
    def tv(self) -> Tensor:
        """``|p - q|``, the total variation between the two policies with all other tokens taken together, ``[B, T]``."""
        train, rollout = self.probabilities
        return (train - rollout).abs_()

    @cached_property
    def bkl(self) -> Tensor:
        """``q ln(q/p) + (1-q) ln((1-q)/(1-p))``, KL(rollout || train) of the same, ``[B, T]`` (DPPO, arXiv:2602.04879)."""
        train, rollout = self.probabilities
        return _binary_kl(rollout, train)

    @cached_property
    def kpop(self) -> Tensor:
        """The larger of the two directions of the binary KL, ``[B, T]`` (KPop, arXiv:2606.15079)."""
        train, rollout = self.probabilities
        return torch.maximum(_binary_kl(rollout, train), _binary_kl(train, rollout))

    @cached_property
    def tokens(self) -> Tensor:
        """Valid tokens of each row, ``[B]``."""
        return row_count(self.ones)

    @cached_property
    def response_tokens(self) -> Tensor:
        """Response tokens of each row, ``[B]``."""
        return row_count(self.response)

    @cached_property
    def highest(self) -> Tensor:
        """Largest log-ratio of each row, ``[B]``; -inf for a row without valid tokens."""
        return self.row_max(self.values)

    @cached_property
    def negated_lowest(self) -> Tensor:
        """Minus the smallest log-ratio of each row, ``[B]``; -inf for a row without valid tokens."""
        return self.row_negated_min(self.values)

    def extremes(self, name: str) -> tuple[Tensor, Tensor]:
        """``row_max`` and ``row_negated_min`` of the statistic of a rule, by the name of its property."""
        if name == "k1":
            return self.of_bounded(self.negated_lowest), self.of_bounded(self.highest)
        return self.row_max(self.divergence(name)), self.row_negated_min(self.divergence(name))

    def of_bounded(self, extreme: Tensor) -> Tensor:
        """The extreme of ``bounded``, from that of ``values``."""
        return extreme.clamp(-SAFETY_BOUND, SAFETY_BOUND).masked_fill(self.tokens == 0, -torch.inf)

    def divergence(self, name: str) -> Tensor:
        """The statistic of a rule, by the name of its property."""
        values: Tensor = getattr(self, name)
        return values

    def row_max(self, values: Tensor) -> Tensor:
        """Largest of finite ``values`` ``[B, T]`` over each row's valid tokens, ``[B]``; -inf for a row without any."""
        if values.shape[-1] == 0:
            return self.tokens.new_full(values.shape[:1], -torch.inf)
        return (values + self._exclusion).amax(dim=-1)

    def row_negated_min(self, values: Tensor) -> Tensor:
        """Minus the smallest of finite ``values`` ``[B, T]`` over each row's valid tokens, ``[B]``; -inf without any."""
        if values.shape[-1] == 0:
            return self.tokens.new_full(values.shape[:1], -torch.inf)
        return (self._exclusion - values).amax(dim=-1)

    def count_above(self, values: Tensor, bound: float) -> Tensor:
        """Each row's valid tokens with ``values > bound``, ``[B]``; ``values`` are 0 where no token is valid."""
        above = holds(torch.gt, values, bound)
        return row_count(above if bound >= 0.0 else above.mul_(self.ones))

    def count_below(self, values: Tensor, bound: float) -> Tensor:
        """Each row's valid tokens with ``values < bound``, ``[B]``; ``values`` are 0 where no token is valid."""
        below = holds(torch.lt, values, bound)
        return row_count(below if bound <= 0.0 else below.mul_(self.ones))


def finite(values: Tensor) -> Tensor:
    """``values`` with 0 in place of NaN and infinities; a copy."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def holds(compare: Callable[..., Tensor], values: Tensor, bound: float | Tensor) -> Tensor:
    """1 where ``compare(values, bound)``, such as ``torch.gt``, is True and 0 elsewhere: a CPU is slow to write bools."""
    return compare(values, bound, out=torch.empty_like(values))


def as_numbers(where: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where the bools are True and 0 elsewhere, by way of bytes: a CPU turns bools to floats one by one."""
    return where.view(torch.uint8).to(dtype)


def row_count(numbers: Tensor) -> Tensor:
    """Sum of each row ``[B, T]`` of zeros and ones, ``[B]``; exact up to 2^24 of them."""
    return numbers.sum(dim=-1)


def true_per_row(where: Tensor) -> Tensor:
    """How many of each row ``[B, T]`` are True, int32 ``[B]``."""
    return where.sum(dim=-1, dtype=torch.int32)


def row_sum(values: Tensor) -> Tensor:
    """Sum of each row ``[B, T]``, added up in float64, ``[B]``."""
    return values.sum(dim=-1, dtype=torch.float64)


def log_ratio(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> LogRatio:
    """Log-ratios of the response tokens; no gradient flows through them.

    Arguments are ``[B, T]``, log-probs in nats. A token whose log-prob is not finite under either policy is not ``valid``: it
    takes part in no statistic and has log-ratio 0 here. What stands outside the mask is never read.
    """
    mask = response_mask.bool()
    dtype = _common_dtype(train_log_probs, rollout_log_probs)
    train = train_log_probs.detach()
    difference = train.to(dtype) - rollout_log_probs.detach().to(dtype)
    values = finite(difference)
    response = as_numbers(mask, dtype)
    ones = holds(torch.eq, values, difference).mul_(response)
    return LogRatio(values.mul_(ones), ones, mask, response, train)


def _common_dtype(train_log_probs: Tensor, rollout_log_probs: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(train_log_probs.dtype, rollout_log_probs.dtype), torch.float32)


def _binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL divergence of two coins that land on 1 with these probabilities."""
    tails = (1.0 - first) * ((1.0 - first) / (1.0 - second)).log_()
    return (first * (first / second).log_()).add_(tails).clamp_min_(0.0)
