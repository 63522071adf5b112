"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SAFETY_BOUND = 20.0
"""Log-ratios (or their sums and means) are bounded by ±20 before exp: e^20 = 4.85e8."""

PROBABILITY_MARGIN = 1e-8
"""Probabilities are kept this far from 0 and 1 before their logarithms are taken."""


@dataclass(frozen=True)
class LogRatio:
    """``l = log pi_train - log pi_rollout`` of some rows, and what is derived from it; what is dear to compute is kept.

    Everything ``[B, T]`` is finite, and 0 where ``valid`` is False: plain sums over it are masked sums. Differences, bounds and
    counts have the precision of the log-probs (float32 at least), exponentials and sums are float64. Selecting by a mask costs
    a CPU several times what arithmetic does, so masks take part as numbers.
    """

    values: Tensor
    """``[B, T]``, nats, unbounded."""
    valid: Tensor
    """bool ``[B, T]``: response tokens with two finite log-probs."""
    response_mask: Tensor
    """bool ``[B, T]``: tokens the policy produced."""
    train_log_probs: Tensor
    """``[B, T]``, nats, as they were given: anything may stand where ``valid`` is False."""

    @property
    def train(self) -> Tensor:
        """Log-probs of the valid tokens under the train policy, ``[B, T]``, nats."""
        return zeroed(self.train_log_probs.to(self.values.dtype), self.valid)

    @cached_property
    def ones(self) -> Tensor:
        """``valid`` as numbers, ``[B, T]``."""
        return as_numbers(self.valid, self.values.dtype)

    @cached_property
    def _exclusion(self) -> Tensor:
        """0 for valid tokens and -inf elsewhere, ``[B, T]``: added to something, it leaves its maxima to valid tokens."""
        return 1.0 - self.ones.reciprocal()

    @property
    def bounded(self) -> Tensor:
        """Token log-ratios within ±``SAFETY_BOUND``, ``[B, T]``."""
        return self.values.clamp(-SAFETY_BOUND, SAFETY_BOUND)

    @cached_property
    def excess(self) -> Tensor:
        """``rho - 1 = exp(bounded l) - 1``, float64 ``[B, T]``, exact near 0."""
        return torch.expm1(self.bounded.double())

    @property
    def k1(self) -> Tensor:
        """``-l``, ``[B, T]``."""
        return -self.bounded

    @property
    def k2(self) -> Tensor:
        """``l^2 / 2``, ``[B, T]``."""
        return self.bounded.square().mul_(0.5)

    @property
    def k3(self) -> Tensor:
        """``exp(l) - 1 - l >= 0``, float64 ``[B, T]``."""
        return (self.excess - self.bounded).clamp_min_(0.0)

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
        """Valid tokens of each row, float64 ``[B]``."""
        return row_sum(self.ones)

    @cached_property
    def response_tokens(self) -> Tensor:
        """Response tokens of each row, float64 ``[B]``."""
        return true_per_row(self.response_mask)

    def divergence(self, name: str) -> Tensor:
        """The statistic of a rule, by the name of its property."""
        values: Tensor = getattr(self, name)
        return values

    def row_max(self, values: Tensor) -> Tensor:
        """Largest of finite ``values`` ``[B, T]`` over each row's valid tokens, float64 ``[B]``; -inf for a row without any."""
        if values.shape[-1] == 0:
            return self.tokens.new_full(values.shape[:1], -torch.inf)
        return (values + self._exclusion).amax(dim=-1).double()

    def count(self, compare: Callable[..., Tensor], values: Tensor, bound: float | Tensor) -> Tensor:
        """Each row's valid tokens with ``compare(values, bound)``, such as ``torch.gt``; float64 ``[B]``, exact up to 2^24."""
        holds = compare(values, bound, out=torch.empty_like(values))
        return holds.mul_(self.ones).sum(dim=-1).double()


def zeroed(values: Tensor, kept: Tensor) -> Tensor:
    """``values`` where the bools ``kept`` are True, 0 elsewhere whatever stands there, NaN included: a bitwise and."""
    integers = torch.int64 if values.dtype == torch.float64 else torch.int32
    every_bit_or_none = kept.to(integers).neg_()
    return every_bit_or_none.bitwise_and_(values.view(integers)).view(values.dtype)


def as_numbers(where: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where True and 0 where False, by way of integers: a CPU turns bools to floats one by one."""
    return where.to(torch.int32).to(dtype)


def true_per_row(where: Tensor) -> Tensor:
    """How many of each row ``[B, T]`` are True, float64 ``[B]``."""
    return where.sum(dim=-1, dtype=torch.int32).double()


def row_sum(values: Tensor) -> Tensor:
    """Sum of each row ``[B, T]``, added up in float64, ``[B]``."""
    return values.sum(dim=-1, dtype=torch.float64)


def check_shapes(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> None:
    """Raise ``ValueError`` unless all three have one shape ``[B, T]``."""
    if not train_log_probs.shape == rollout_log_probs.shape == response_mask.shape or train_log_probs.ndim != 2:
        raise ValueError(
            "train_log_probs, rollout_log_probs and response_mask must have one shape [B, T]; got "
            f"{list(train_log_probs.shape)}, {list(rollout_log_probs.shape)} and {list(response_mask.shape)}"
        )


def log_ratio(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> LogRatio:
    """Log-ratios of the response tokens; no gradient flows through them.

    Arguments are ``[B, T]``, log-probs in nats. A token whose log-prob is not finite under either policy is not ``valid``: it
    takes part in no statistic and has log-ratio 0 here. What stands outside the mask is never read.
    """
    mask = response_mask.bool()
    dtype = torch.promote_types(torch.promote_types(train_log_probs.dtype, rollout_log_probs.dtype), torch.float32)
    train = train_log_probs.detach()
    difference = train.to(dtype) - rollout_log_probs.detach().to(dtype)
    valid = (difference.abs() < torch.inf) & mask
    return LogRatio(zeroed(difference, valid), valid, mask, train)


def _binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL divergence of two coins that land on 1 with these probabilities."""
    tails = (1.0 - first) * ((1.0 - first) / (1.0 - second)).log_()
    return (first * (first / second).log_()).add_(tails).clamp_min_(0.0)
