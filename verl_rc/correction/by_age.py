"""Tokens by their age: how many updates lie between the weights that sampled them and the current ones.

The gap grows with age, but the mean ratio before truncation is 1 at every age: where it is not, versions are wrong.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.linalg import vecdot

from verl_rc.correction.log_ratio import LogRatio, sequence_sum
from verl_rc.correction.rejection import Rejection
from verl_rc.correction.totals import AgeTotals, Gap, Mean
from verl_rc.correction.weights import Weights, sums_of_tokens

NUM_AGES = 5
"""Ages are told apart up to the last of these, which stands for all older tokens too."""


def totals_by_age(ratio: LogRatio, ages: Tensor, rejection: Rejection, weights: Weights | None) -> tuple[AgeTotals[Tensor], ...]:
    """What every row adds by age; ``ages`` int64 ``[b, t]`` are updates since the weights that sampled each token."""
    keep = rejection.keep_tokens * rejection.keep_rows[:, None]
    found: list[AgeTotals[Tensor]] = []
    for here in buckets(ages, NUM_AGES):
        # Rejected of response tokens, the rest of valid tokens: one without a finite log-prob has no gap and no weight.
        ones, response = here * ratio.ones, sequence_sum(here * ratio.response)
        of_weights, truncated = None, None
        if weights is not None:
            # Where all tokens of a row share a weight, each of them counts with it.
            raw, applied = (w if w.ndim == 2 else w[:, None] for w in (weights.raw_excess, weights.excess))
            of_weights, truncated = sums_of_tokens(applied * ones, ones, ones.sum(dim=-1)), sequence_sum((raw != applied) * ones)
        found.append(AgeTotals(gap(ratio, ones), Mean(response - sequence_sum(keep * here), response), of_weights, truncated))
    return tuple(found)


def buckets(numbers: Tensor, count: int) -> Iterator[Tensor]:
    """For each of ``count`` buckets float64 ``[b, t]``: 1 where ``numbers``, integers, fall into it; the last takes all above."""
    # One after the other and not as one tensor with a dimension more, so that temporaries stay small.
    for bucket in range(count):
        yield (numbers.clamp(0, count - 1) == bucket).double()


def gap(ratio: LogRatio, ones: Tensor) -> Gap[Tensor]:
    """How far the policies are apart on the valid tokens where ``ones``, float64 ``[b, t]``, is 1 and not 0."""
    return Gap(sequence_sum(ones), sequence_sum(ratio.values * ones), vecdot(ratio.k3, ones))
