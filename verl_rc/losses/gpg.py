"""The plain policy gradient without a ratio."""

from __future__ import annotations

from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def gpg_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Group policy gradient (GPG, arXiv:2504.02546); the loss mode ``gpg``.

    ``−w A lp``: no ratio, no clip; `old_log_probs` is not looked at. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and no metrics.
    """
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}
