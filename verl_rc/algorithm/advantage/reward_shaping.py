"""Scores before advantages are computed: those of episodes, and reductions by the divergence from the
reference policy and for a length near the limit."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from verl_rc.tensor_ops import kl_penalty


def episode_scores(
    turn_rewards: Sequence[Sequence[float]],
    function_scores: Tensor | None,
    source: Literal["turns", "function", "sum"],
) -> Tensor:
    """Return the score of each episode: the sum of its ``turn_rewards``, the score ``[B]`` that the reward
    function gave it, or both.

    float32 ``[B]``, in units of reward. With ``turns`` the function's scores are not read.
    """
    totals = torch.tensor([math.fsum(rewards) for rewards in turn_rewards], dtype=torch.float32)
    if source == "turns":
        return totals
    assert function_scores is not None
    return function_scores if source == "function" else function_scores + totals


def apply_kl_in_reward(
    token_level_scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """Subtract the estimated divergence from each response token's score (arXiv:1909.08593).

    r = s − β KL_t(policy ‖ reference) on response tokens; elsewhere, and where the divergence is not finite,
    r = s: rollout correction has the rule for log-probs that are no numbers.

    Args:
        token_level_scores: [B, T], in units of reward.
        log_probs: [B, T], nats; of the policy that answered, as the trainer computes them.
        ref_log_probs: [B, T], nats; of the reference policy.
        response_mask: [B, T], bool or 0/1.
        kl_coef: β, in units of reward per nat.
        kind: an estimator of ``kl_penalty`` (``algorithm.kl_penalty``).

    Returns:
        Token-level rewards [B, T], and the divergence of each row, the mean over its response tokens, [B],
        nats; 0 for a row without any.

    Raises:
        ValueError: for an unknown estimator, or when shapes differ.
    """
    tensors = (log_probs, ref_log_probs, response_mask)
    if token_level_scores.ndim != 2 or any(tensor.shape != token_level_scores.shape for tensor in tensors):
        raise ValueError(
            "token_level_scores, log_probs, ref_log_probs and response_mask must be [B, T] of one shape; got "
            f"{tuple(token_level_scores.shape)} and {[tuple(tensor.shape) for tensor in tensors]}"
        )
    mask = response_mask.bool()
    divergence = kl_penalty(log_probs, ref_log_probs, kind).detach()
    # One log-prob that is NaN would make every advantage of its group NaN, and the weight of the penalty.
    divergence = divergence.where(mask & divergence.isfinite(), 0)
    return token_level_scores - kl_coef * divergence, divergence.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def overlong_penalty(
    response_lengths: Tensor, max_length: int, buffer_length: int, penalty_factor: float
) -> Tensor:
    """Return what is added to each score: 0 up to ``max_length - buffer_length`` tokens, then falling in a
    straight line to ``-penalty_factor`` at ``max_length``, and no further (soft overlong punishment, DAPO,
    arXiv:2503.14476, eq. 13).

    ``response_lengths`` is int ``[B]``, tokens; ``buffer_length`` is in (0, ``max_length``]. Returns float32
    ``[B]``, <= 0, in units of reward.
    """
    excess = (response_lengths - (max_length - buffer_length)).clamp(0, buffer_length)
    return 0.0 - penalty_factor * excess.to(torch.float32) / buffer_length
