"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import Divergence
from verl_rc.tensor_ops import binary_kl, bound_log_ratio, k1_estimate, k2_estimate, require_functions
from verl_rc.tensor_ops.masked import turn_numbers

PROBABILITY_MARGIN = 1e-8
"""Probabilities stay this far from 0 and 1: further out their binary KL is that of rounding, or infinite.
"""


@dataclass(frozen=True)
class LogRatio:
    """``l = log pi_train - log pi_rollout`` of the tokens of some sequences. No gradient flows through it.

    ``values``, ``train`` and ``rollout`` are 0 where a token is not valid, and so is every divergence: their
    sums over positions are sums over valid tokens.
    """

    values: Tensor
    """``[b, t]``, nats, unbounded, in the precision of the log-probs (float32 at least)."""
    train: Tensor
    """``[b, t]``: log-probs under the train policy, nats."""
    rollout: Tensor
    """``[b, t]``: likewise under the rollout policy."""
    valid: Tensor
    """bool ``[b, t]``: response tokens with two finite log-probs."""
    response: Tensor
    """bool ``[b, t]``: response tokens."""

    @classmethod
    def from_log_probs(cls, train: Tensor, rollout: Tensor, response_mask: Tensor) -> "LogRatio":
        """From ``[b, t]`` each. What stands outside the mask is never read."""
        # The gap is often as small as the last digit of a log-prob in bfloat16.
        dtype = torch.promote_types(torch.promote_types(train.dtype, rollout.dtype), torch.float32)
        # Contiguous: the order of sums must not depend on how the inputs lie in memory.
        train, rollout = (one.detach().to(dtype).contiguous() for one in (train, rollout))
        response = response_mask.bool().contiguous()
        valid = response & (train - rollout).isfinite()
        train, rollout = torch.where(valid, train, 0.0), torch.where(valid, rollout, 0.0)
        return cls(train - rollout, train, rollout, valid, response)

    @cached_property
    def bounded(self) -> Tensor:
        """Log-ratios within ±``LOG_RATIO_BOUND``, float64."""
        return bound_log_ratio(self.values).double()

    @cached_property
    def excess(self) -> Tensor:
        """``rho - 1 = exp(bounded l) - 1``, float64, precise near 0, where log-ratios often are."""
        return torch.expm1(self.bounded)

    @cached_property
    def k3(self) -> Tensor:
        """``exp(l) - 1 - l >= 0``, float64; rounding may leave the difference a little below 0."""
        return (self.excess - self.bounded).clamp(min=0.0)

    @cached_property
    def has_response(self) -> Tensor:
        """bool ``[b]``: sequences with response tokens."""
        return self.response.any(dim=-1)

    @cached_property
    def ones(self) -> Tensor:
        """float64 ``[b, t]``: 1 for valid tokens, 0 elsewhere."""
        return self.valid.double()

    @cached_property
    def lengths(self) -> Tensor:
        """float64 ``[b]``: valid tokens of each sequence."""
        return self.valid.count_nonzero(dim=-1).double()

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sums of ``values`` ``[b, t]``, 0 where not valid, over each sequence, float64 ``[b]``."""
        return values.sum(dim=-1, dtype=torch.float64)

    def sequence_means(self, values: Tensor) -> Tensor:
        """Means of ``values`` ``[b, t]``, 0 where not valid, over the valid tokens of each sequence, float64
        ``[b]``; 0 without any."""
        return self.sequence_sums(values) / self.lengths.clamp(min=1)

    def sequence_maxima(self, values: Tensor) -> Tensor:
        """Largest of ``values >= 0`` ``[b, t]``, 0 where not valid, of each sequence, ``[b]``."""
        return values.amax(dim=-1) if values.shape[-1] else values.sum(dim=-1)

    @cached_property
    def turns(self) -> Tensor:
        """int64 ``[b, t]``: number of each response token's turn."""
        return turn_numbers(self.response)

    def turn_sums(self, values: Tensor) -> Tensor:
        """Sums of ``values`` ``[b, t]``, 0 where not valid, over the turn of each response token, float64
        ``[b, t]``."""
        sums = torch.zeros_like(values, dtype=torch.float64).scatter_add(-1, self.turns, values.double())
        return sums.gather(-1, self.turns)

    def divergence(self, name: Divergence) -> Tensor:
        """The statistic of a rule for each token, float64 ``[b, t]``, by ``RejectionRule.divergence``."""
        return _DIVERGENCES[name](self)

    @property
    def _log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Log-probs of train and rollout, float64, cut to probabilities inside ``PROBABILITY_MARGIN``."""
        train, low, high = self.train.double(), math.log(PROBABILITY_MARGIN), math.log1p(-PROBABILITY_MARGIN)
        return train.clamp(low, high), self.rollout.double().clamp(low, high)


# These three look at the probability of the token under each policy, all other tokens taken together.
def _total_variation(ratio: LogRatio) -> Tensor:
    log_p, log_q = ratio._log_probabilities
    return (log_p.exp() - log_q.exp()).abs()


def _binary_kl(ratio: LogRatio) -> Tensor:
    """KL(rollout || train): DPPO, arXiv:2602.04879."""
    log_p, log_q = ratio._log_probabilities
    return binary_kl(log_q, log_p).clamp(min=0.0)  # rounding may leave a little below 0


def _larger_binary_kl(ratio: LogRatio) -> Tensor:
    """The larger of both directions: KPop, arXiv:2606.15079."""
    log_p, log_q = ratio._log_probabilities
    return torch.maximum(binary_kl(log_q, log_p), binary_kl(log_p, log_q)).clamp(min=0.0)


_DIVERGENCES: Mapping[str, Callable[[LogRatio], Tensor]] = {
    "k1": lambda ratio: k1_estimate(ratio.bounded),
    "k2": lambda ratio: k2_estimate(ratio.bounded),
    "k3": lambda ratio: ratio.k3,
    "tv": _total_variation,
    "bkl": _binary_kl,
    "kpop": _larger_binary_kl,
}
require_functions("divergence", get_args(Divergence), _DIVERGENCES)
