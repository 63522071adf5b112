"""Less score for responses that come near the length limit."""

import torch
from torch import Tensor


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer_length: int, penalty_factor: float) -> Tensor:
    """What is added to each score: 0 up to ``max_length - buffer_length`` tokens, then falling in a straight line to
    ``-penalty_factor`` at ``max_length``, and no further (soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13).

    ``response_lengths`` is int ``[B]``, tokens; returns float32 ``[B]``, <= 0, in units of reward. Raises ``ValueError`` unless
    ``0 < buffer_length <= max_length``.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(
            "reward.reward_kwargs.overlong_buffer_cfg.len must be positive and at most the longest length that is rewarded in "
            f"full, {max_length}; got {buffer_length}."
        )
    excess = (response_lengths - (max_length - buffer_length)).clamp(0, buffer_length)
    return 0.0 - penalty_factor * excess.to(torch.float32) / buffer_length
