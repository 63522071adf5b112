"""The critic's clipped regression loss and how well its values explain the returns."""

import torch
from torch import Tensor

from verl_rc.algorithm.losses.aggregate import Aggregation, token_mean
from verl_rc.algorithm.losses.inputs import LossMetrics
from verl_rc.config.algorithms import LossAggregation

VARIANCE_EPSILON = 1e-5
"""Added to the variance of the returns, in squared units of reward."""


def compute_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange_value: float,
    aggregation: LossAggregation | Aggregation = "token-mean",
) -> tuple[Tensor, LossMetrics]:
    """Compute the clipped squared error of the critic (PPO, arXiv:1707.06347; the clip is that of its
    implementation).

    ``½ max((v − R)², (clip(v, v_old − c, v_old + c) − R)²)``, aggregated over the mask.

    Args:
        values: [B, T], in units of reward; the critic being updated; carries the gradient.
        old_values: [B, T], in units of reward; the critic before the update.
        returns: [B, T], in units of reward.
        mask: [B, T], bool or 0/1; response tokens. NaN outside is harmless.
        cliprange_value: c, in units of reward, > 0 (``critic.cliprange_value``).
        aggregation: a mode's name, or the record with the mini-batch's denominators.

    Returns:
        The loss, 0-d, in squared units of reward, and ``critic/vf_clipfrac`` (share of tokens whose clipped
        error is the larger one), ``critic/vpred_mean`` (mean value).

    Raises:
        ValueError: when shapes differ or ``cliprange_value`` is not positive.
    """
    _check_values(mask, values=values, old_values=old_values, returns=returns)
    if not cliprange_value > 0:
        raise ValueError(
            f"critic.cliprange_value must be > 0 (a large one turns clipping off); got {cliprange_value}"
        )
    inside = mask.bool()
    values, old_values, returns = (
        tensor.where(inside, 0) for tensor in (values, old_values.detach(), returns.detach())
    )
    # The maximum of both errors, as in OpenAI's baselines: clipping never makes the error smaller.
    clipped_values = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    error, clipped_error = (values - returns).square(), (clipped_values - returns).square()
    loss = Aggregation.from_name(aggregation).reduce(0.5 * torch.maximum(error, clipped_error), inside)
    return loss, {
        "critic/vf_clipfrac": token_mean(clipped_error > error, inside),
        "critic/vpred_mean": token_mean(values, inside),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """``1 − Var(R − v) / (Var(R) + 1e-5)``, 0-d float64; 1 is perfect, 0 no better than the mean.

    Args:
        values: [B, T], in units of reward.
        returns: [B, T], in units of reward.
        mask: [B, T], bool or 0/1; response tokens. NaN outside is harmless.

    Raises:
        ValueError: when shapes differ.
    """
    _check_values(mask, values=values, returns=returns)
    inside = mask.bool()
    # float64: in Σx² − (Σx)²/n nearly equal numbers cancel, and float32 keeps 7 digits of them.
    returns = returns.detach().to(torch.float64).where(inside, 0)
    errors = returns - values.detach().to(torch.float64).where(inside, 0)
    count = inside.sum().to(torch.float64)
    return 1 - _variance(errors, count) / (_variance(returns, count) + VARIANCE_EPSILON)


def _variance(values: Tensor, count: Tensor) -> Tensor:
    """Variance of ``count`` numbers, all others 0, with n − 1 in the denominator; 0 for fewer than two."""
    # What cancels may leave a small negative number.
    squares = values.square().sum() - values.sum().square() / count.clamp(min=1)
    return squares.clamp(min=0) / (count - 1).clamp(min=1)


def _check_values(mask: Tensor, **tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if mask.ndim != 2 or any(shape != tuple(mask.shape) for shape in shapes.values()):
        raise ValueError(
            f"values, returns and mask must be [B, T] of one shape; mask is {tuple(mask.shape)}, {shapes}"
        )
