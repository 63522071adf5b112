"""Estimators of a divergence between two policies from the log-probs of sampled tokens."""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

import torch
from torch import Tensor

from verl_rc.config.models import KlKind
from verl_rc.metrics.bounds import LOG_RATIO_BOUND

_K3_BOUND = 10.0
KL_KINDS: tuple[str, ...] = get_args(KlKind)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on tokens the policy sampled (Schulman 2020,
    "Approximating KL divergence").

    With ``d = log_probs - ref_log_probs`` (any equal shapes, nats, in float32 at least): k1 = d, abs = |d|,
    k2 = d^2 / 2, k3 = exp(-d) + d - 1 (``-d`` bounded by ±20, the result by ±10). A ``+`` keeps the value and
    takes k2's gradient, which is that of the KL itself: ``k2 - sg(k2) + sg(base)``; k1's own gradient has
    mean zero and k3's is that of the opposite divergence. Raises ``ValueError`` for an unknown kind, and for
    ``full``, which sampled log-probs cannot give.
    """
    if kind == "full":
        raise ValueError(
            "kl 'full' needs whole distributions, not sampled tokens' log-probs; use one of "
            f"{', '.join(KL_KINDS)}."
        )
    if kind not in KL_KINDS:
        raise ValueError(f"the KL estimator must be one of {', '.join(KL_KINDS)}; got {kind!r}.")
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, ref_log_probs.dtype), torch.float32)
    difference = log_probs.to(dtype) - ref_log_probs.to(dtype)  # k3 of small gaps is lost in bfloat16
    value = _ESTIMATES[kind.removesuffix("+")](difference)
    if not kind.endswith("+"):
        return value
    squared = _ESTIMATES["k2"](difference)
    return squared - squared.detach() + value.detach()


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio (nats) to ± ``LOG_RATIO_BOUND``."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1_estimate(log_ratio: Tensor) -> Tensor:
    """``-l``, whose mean is KL(sampler || other); ``l`` is log(other / sampler) of tokens from the sampler,
    nats."""
    return -log_ratio


def k2_estimate(log_ratio: Tensor) -> Tensor:
    """``l^2 / 2``: never negative, equal to the divergence to second order."""
    return log_ratio.square() / 2


def k3_estimate(log_ratio: Tensor) -> Tensor:
    """``exp(l) - 1 - l``: non-negative up to rounding, same mean as k1. Clamp ``l`` first."""
    return torch.expm1(log_ratio) - log_ratio


def binary_kl(log_first: Tensor, log_second: Tensor) -> Tensor:
    """``p ln(p/q) + (1-p) ln((1-p)/(1-q))``: KL of two policies with all but the sampled token taken
    together.

    ``log_first`` and ``log_second`` are ln p and ln q, nats, <= 0. The inputs are log-probs because
    logarithms of probabilities near 0 and 1 lose precision.
    """
    complement_first, complement_second = -torch.expm1(log_first), -torch.expm1(log_second)
    ratio = complement_first / complement_second.clamp(min=torch.finfo(complement_second.dtype).tiny)
    return log_first.exp() * (log_first - log_second) + torch.xlogy(complement_first, ratio)


def _bounded_k3(difference: Tensor) -> Tensor:
    return k3_estimate(bound_log_ratio(-difference)).clamp(-_K3_BOUND, _K3_BOUND)


_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    **dict.fromkeys(("k1", "kl"), lambda difference: k1_estimate(-difference)),
    **dict.fromkeys(("k2", "mse"), lambda difference: k2_estimate(-difference)),
    **dict.fromkeys(("k3", "low_var_kl"), _bounded_k3),
}


def require_functions(kind: str, names: Iterable[str], functions: Mapping[str, object]) -> None:
    """Raise ``TypeError`` unless exactly ``names`` have functions; ``kind`` says what they name.

    Modules call it when they are imported, so that a name never computes another name's formula.
    """
    if mismatch := set(names) ^ functions.keys():
        raise TypeError(
            f"each name of a {kind} must have a function, and each function a name; only one of them is "
            f"there for {', '.join(sorted(mismatch))}. Add the other."
        )


require_functions("KL estimator", {kind.removesuffix("+") for kind in KL_KINDS}, _ESTIMATES)
