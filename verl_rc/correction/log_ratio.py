"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

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
    """``l = log pi_train - log pi_rollout`` of some rows in float64, and what is derived from it, each computed once.

    Everything ``[B, T]`` is 0 where ``valid`` is False, so plain sums over it are masked sums.
    """

    values: Tensor
    """``[B, T]``, nats, unbounded."""
    valid: Tensor
    """bool ``[B, T]``: response tokens with two finite log-probs."""
    response_mask: Tensor
    """bool ``[B, T]``: tokens the policy produced."""
    train: Tensor
    """``[B, T]``, nats: log-probs under the train policy."""

    @cached_property
    def bounded(self) -> Tensor:
        """Token log-ratios within ±``SAFETY_BOUND``, ``[B, T]``."""
        return self.values.clamp(-SAFETY_BOUND, SAFETY_BOUND)

    @cached_property
    def excess(self) -> Tensor:
        """``rho - 1 = exp(bounded l) - 1``, ``[B, T]``, exact near 0."""
        return torch.expm1(self.bounded)

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
        """``exp(l) - 1 - l >= 0``, ``[B, T]``."""
        return (self.excess - self.bounded).clamp_min_(0.0)

    @cached_property
    def probabilities(self) -> tuple[Tensor, Tensor]:
        """Of the sampled tokens under train and under rollout, ``[B, T]``, kept ``PROBABILITY_MARGIN`` away from 0 and 1."""
        train, rollout = self.train.exp(), (self.train - self.values).exp()
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
        return self.valid.sum(dim=-1).double()

    @cached_property
    def response_tokens(self) -> Tensor:
        """Response tokens of each row, float64 ``[B]``."""
        return self.response_mask.sum(dim=-1).double()

    def divergence(self, name: str) -> Tensor:
        """The statistic of a rule, by the name of its property."""
        values: Tensor = getattr(self, name)
        return values

    def row_max(self, values: Tensor) -> Tensor:
        """Largest of ``values`` ``[B, T]`` over each row's valid tokens, ``[B]``; -inf for a row without any."""
        if values.shape[-1] == 0:
            return values.new_full(values.shape[:1], -torch.inf)
        return values.masked_fill(~self.valid, -torch.inf).amax(dim=-1)


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
    difference = train_log_probs.detach().double() - rollout_log_probs.detach().double()
    valid = difference.isfinite() & mask
    invalid = ~valid
    train = train_log_probs.detach().double().masked_fill(invalid, 0.0)
    return LogRatio(difference.masked_fill_(invalid, 0.0), valid, mask, train)


def _binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL divergence of two coins that land on 1 with these probabilities."""
    tails = (1.0 - first) * ((1.0 - first) / (1.0 - second)).log_()
    return (first * (first / second).log_()).add_(tails).clamp_min_(0.0)
