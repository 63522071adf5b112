"""Estimators of a divergence between two policies from the log-probs of sampled tokens."""

from typing import get_args

import torch
from torch import Tensor

from verl_rc.config.actor import KlKind

_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_KINDS: tuple[str, ...] = get_args(KlKind)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on tokens the policy sampled (Schulman 2020, "Approximating KL
    divergence").

    With ``d = log_probs - ref_log_probs`` (any equal shapes, nats; at least in float32): k1 = d, abs = |d|, k2 = d^2 / 2,
    k3 = exp(-d) + d - 1 (``-d`` bounded by ±20, the result by ±10). A ``+`` keeps the value and takes k2's gradient, which
    is that of the KL itself: ``k2 - sg(k2) + sg(base)``; k1's own gradient has mean zero and k3's is that of the opposite
    divergence.
    Raises ``ValueError`` for an unknown kind, and for ``full``, which sampled log-probs cannot give.
    """
    if kind == "full":
        raise ValueError(f"kl 'full' needs whole distributions, not sampled tokens' log-probs; use one of {', '.join(KL_KINDS)}.")
    if kind not in KL_KINDS:
        raise ValueError(f"the KL estimator must be one of {', '.join(KL_KINDS)}; got {kind!r}.")
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, ref_log_probs.dtype), torch.float32)
    difference = log_probs.to(dtype) - ref_log_probs.to(dtype)  # k3 of small gaps is lost in bfloat16
    value = _estimate(difference, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    squared = _estimate(difference, "k2")
    return squared - squared.detach() + value.detach()


def _estimate(difference: Tensor, kind: str) -> Tensor:
    name = _ALIASES.get(kind, kind)
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return difference.square() / 2
    negative = (-difference).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (torch.expm1(negative) - negative).clamp(-_K3_BOUND, _K3_BOUND)
