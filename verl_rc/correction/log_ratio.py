"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.config.rejection_rules import Divergence
from verl_rc.correction.sequences import LogProbs
from verl_rc.correction.totals import SequenceSums
from verl_rc.metrics.mergeable import Extremes, Moments
from verl_rc.tensor_ops import binary_kl, bound_log_ratio, k1_estimate, k2_estimate, require_functions
from verl_rc.tensor_ops.masked import turn_numbers

PROBABILITY_MARGIN = 1e-8
"""Probabilities are kept this far from 0 and 1: further out their binary KL is that of rounding, or infinite.
"""


@dataclass(frozen=True)
class LogRatio:
    """``l = log pi_train - log pi_rollout`` of the tokens of some sequences, and the statistics that rules
    look at.

    Every ``[b, t]`` is finite, and 0 where no token is valid, so that plain sums are masked sums. Differences
    have the precision of the log-probs (float32 at least); exponentials and sums are float64. Masks are
    numbers, 1 and 0: on a CPU a product takes a third of the time of ``where``, and nothing infinite is left
    that 0 would turn into NaN.
    """

    values: Tensor
    """``[b, t]``, nats, unbounded."""
    valid: Tensor
    """``[b, t]``: 1 for valid tokens, that is response tokens with two finite log-probs, and 0 elsewhere."""
    response: Tensor
    """``[b, t]``: 1 for response tokens, and 0 elsewhere."""
    log_probs: LogProbs
    sums: SequenceSums

    @classmethod
    def from_log_probs(cls, log_probs: LogProbs) -> "LogRatio":
        """No gradient flows through the result. What stands outside the mask is never read."""
        dtype = log_probs.dtype
        difference = log_probs.train.detach().to(dtype) - log_probs.rollout.detach().to(dtype)
        values = torch.nan_to_num(difference, 0.0, 0.0, 0.0)
        # By way of integers: a CPU turns bools to floats one by one, three times slower.
        response = log_probs.response_mask.bool().int().to(dtype)
        # A difference is finite only where both log-probs are: infinite ones that are equal leave NaN, too.
        valid = torch.eq(values, difference, out=difference).mul_(response)
        values.mul_(valid)  # what is not finite is 0 by now: 0 times infinity would be NaN
        # A copy in any precision: its signs are dropped once they are added up.
        precise = values.to(torch.float64, copy=True)
        log_ratio = sequence_sum(precise)
        distances = precise.abs_()
        sums = SequenceSums(
            # A count is exact in float32, too, up to 16 million.
            tokens=valid.sum(dim=-1).double(),
            response_tokens=response.sum(dim=-1).double(),
            log_ratio=log_ratio,
            distance=sequence_sum(distances),
            farthest=largest(distances),
        )
        return cls(values, valid, response, log_probs, sums)

    @cached_property
    def train(self) -> Tensor:
        """``[b, t]``: log-probs of the valid tokens under the train policy, nats."""
        return torch.nan_to_num(self.log_probs.train.detach().to(self.log_probs.dtype), 0.0, 0.0, 0.0).mul_(
            self.valid
        )

    @cached_property
    def bounded(self) -> Tensor:
        """Log-ratios within ±``LOG_RATIO_BOUND``."""
        return bound_log_ratio(self.values)

    @cached_property
    def precise(self) -> Tensor:
        """``bounded`` in float64."""
        return self.bounded.double()

    @cached_property
    def excess(self) -> Tensor:
        """``rho - 1 = exp(bounded l) - 1``, float64, exact near 0."""
        # Log-ratios are often 1e-4 and less: exp(l) - 1 would keep few of their digits in float64 and none in
        # float32.
        return torch.expm1(self.precise)

    @cached_property
    def k3(self) -> Tensor:
        """``exp(l) - 1 - l >= 0``, float64: ``k3_estimate`` with the exponential that weights and metrics
        take, too."""
        # Near 0 both terms agree in most digits, and what rounding leaves of their difference can be
        # negative.
        return (self.excess - self.precise).clamp_min_(0.0)

    @cached_property
    def turns(self) -> Tensor:
        """int64 ``[b, t]``: number of each response token's turn."""
        return turn_numbers(self.response)

    def turn_sums(self, values: Tensor) -> Tensor:
        """Sum of ``values`` ``[b, t]``, 0 where no token is valid, over the turn of each response token;
        float64 ``[b, t]``, any number elsewhere."""
        sums = torch.zeros_like(values, dtype=torch.float64).scatter_add_(-1, self.turns, values.double())
        return sums.gather(-1, self.turns)

    def divergence(self, name: Divergence) -> Tensor:
        """The statistic of a rule for each token ``[b, t]``, by the name in ``RejectionRule.divergence``."""
        return _DIVERGENCES[name](self)

    @property
    def _log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Log-probs of train and rollout, float64, cut to probabilities inside ``PROBABILITY_MARGIN``."""
        train, low, high = self.train.double(), math.log(PROBABILITY_MARGIN), math.log1p(-PROBABILITY_MARGIN)
        return train.clamp(low, high), (train - self.values).clamp_(low, high)

    def count(self, members: Tensor) -> Tensor:
        """Number of valid tokens of each sequence where ``members``, ``[b, t]``, is 1 and not 0; float64
        ``[b]``."""
        return (members * self.valid).sum(dim=-1).double()


# These three look at the probability of the token under each policy, all other tokens taken together.
def _total_variation(ratio: LogRatio) -> Tensor:
    log_p, log_q = ratio._log_probabilities
    return (log_p.exp() - log_q.exp()).abs_()


def _binary_kl(ratio: LogRatio) -> Tensor:
    """KL(rollout || train): DPPO, arXiv:2602.04879."""
    log_p, log_q = ratio._log_probabilities
    return binary_kl(log_q, log_p).clamp_min_(0.0)  # rounding may leave a little below 0


def _larger_binary_kl(ratio: LogRatio) -> Tensor:
    """The larger of both directions: KPop, arXiv:2606.15079."""
    log_p, log_q = ratio._log_probabilities
    return torch.maximum(binary_kl(log_q, log_p), binary_kl(log_p, log_q)).clamp_min_(0.0)


_DIVERGENCES: Mapping[str, Callable[[LogRatio], Tensor]] = {
    "k1": lambda ratio: k1_estimate(ratio.bounded),
    "k2": lambda ratio: k2_estimate(ratio.bounded),
    "k3": lambda ratio: ratio.k3,
    "tv": _total_variation,
    "bkl": _binary_kl,
    "kpop": _larger_binary_kl,
}
require_functions("divergence", get_args(Divergence), _DIVERGENCES)


def indicator(compare: Callable[..., Tensor], values: Tensor, bound: float | Tensor) -> Tensor:
    """1 where ``compare(values, bound)`` holds, and 0 elsewhere; of the shape and type of ``values``."""
    # Comparisons that write bools, and products with bools, take three times as long on a CPU.
    return compare(values, bound, out=torch.empty_like(values))


def extremes(values: Tensor, count: Tensor) -> Extremes[Tensor]:
    """Largest and smallest of the finite ``values``, ``[b]`` or of each sequence ``[b, t]``, whose ``count``
    is not 0."""
    # 0 for what counts and -inf elsewhere: added to something, it leaves the maximum to what counts.
    excluded = 1.0 - count.clamp_max(1.0).reciprocal()
    upper, lower = excluded + values, excluded - values
    return (
        Extremes(largest(upper), largest(lower))
        if values.ndim == 2
        else Extremes(upper.double(), lower.double())
    )


def moments(values: Tensor, count: Tensor) -> Moments[Tensor]:
    """Moments, float64 ``[b]``, of ``values`` ``[b]`` that count ``count`` ``[b]`` times, or of those of each
    sequence, ``[b, t]``: ``count`` of them, all others 0."""
    if values.ndim == 1:
        return Moments(count * values, count, count * values.square())
    is_precise = values.dtype == torch.float64  # a dot product of float32 would be summed in float32
    squares = vecdot(values, values) if is_precise else sequence_sum(values.square())
    return Moments(sequence_sum(values), count, squares)


def largest(values: Tensor) -> Tensor:
    """Largest value of each sequence ``[b, t]``, float64 ``[b]``; -inf where there are no positions."""
    return values.amax(dim=-1).double() if values.shape[-1] else sequence_sum(values) - torch.inf


def sequence_sum(values: Tensor) -> Tensor:
    """Sum of each sequence ``[b, t]``, float64 ``[b]``."""
    # Thousands of float32 terms would lose the digits that tell a gap of 1e-5 from none.
    return values.sum(dim=-1, dtype=torch.float64)
