"""Log-probs of tokens and entropies of distributions from logits, in row chunks; interpolated log-probs of two policies."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_rc.tensor_ops.masked import row_slices

_CHUNK_ELEMENTS = {"cpu": 1 << 20}
_CHUNK_ELEMENTS_ON_ACCELERATORS = 1 << 26


def log_probs_from_logits(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """``log softmax(logits / temperature)[token_ids]``, with gradient.

    ``logits`` is ``[N, V]``, ``token_ids`` int64 ``[N]``; returns ``[N]``, nats, in float32 (float64 for float64 logits).
    Temporaries in that precision exist for one chunk of rows at a time. Raises ``ValueError`` for other shapes or a
    temperature that is not positive.
    """
    _check(logits, temperature)
    if token_ids.shape != logits.shape[:1]:
        raise ValueError(f"token_ids must be [N] for logits [N, V]; got {list(token_ids.shape)} and {list(logits.shape)}")
    result: Tensor = _TokenLogProbs.apply(logits, token_ids, temperature)  # type: ignore[no-untyped-call]
    return result


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """``H = -sum_v p_v log p_v`` with ``p = softmax(logits / temperature)``, with gradient.

    ``[N, V]`` to ``[N]``, nats, in float32 (float64 for float64 logits); logits of -inf count as probability 0. Memory and
    errors as in ``log_probs_from_logits``.
    """
    _check(logits, temperature)
    result: Tensor = _Entropies.apply(logits, temperature)  # type: ignore[no-untyped-call]
    return result


def sum_pi_squared_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """``sum_v p_v^2`` with ``p = softmax(logits / temperature)``: the probability of drawing the same token twice.

    ``[N, V]`` to ``[N]``, in (0, 1], without gradient; precision, memory and errors as in ``log_probs_from_logits``.
    """
    _check(logits, temperature)
    sums = logits.new_empty(logits.shape[:1], dtype=_precision(logits))
    with torch.no_grad():
        for rows in _row_chunks(logits):
            sums[rows] = _scaled(logits[rows], temperature).softmax(dim=-1).square_().sum(dim=-1)
    return sums


class _TokenLogProbs(torch.autograd.Function):
    """Saves the logits and their normalisers; the backward pass recomputes the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        normalisers = logits.new_empty(logits.shape[:1], dtype=_precision(logits))
        chosen = torch.empty_like(normalisers)
        for rows in _row_chunks(logits):
            scaled = _scaled(logits[rows], temperature)
            normalisers[rows] = scaled.logsumexp(dim=-1)
            chosen[rows] = scaled.gather(-1, token_ids[rows, None])[:, 0]
        ctx.save_for_backward(logits, token_ids, normalisers)
        ctx.temperature = temperature
        return chosen.sub_(normalisers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """``(onehot(token) - softmax) / temperature``."""
        logits, token_ids, normalisers = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            slope = (grad_output[rows] / ctx.temperature)[:, None]
            chunk = _scaled(logits[rows], ctx.temperature).sub_(normalisers[rows, None]).exp_().mul_(-slope)
            grad_logits[rows] = chunk.scatter_add_(-1, token_ids[rows, None], slope.to(chunk.dtype))
        return grad_logits, None, None


class _Entropies(torch.autograd.Function):
    """Saves the logits and the entropies; the backward pass recomputes the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropies = logits.new_empty(logits.shape[:1], dtype=_precision(logits))
        for rows in _row_chunks(logits):
            entropies[rows] = torch.special.entr(_scaled(logits[rows], temperature).softmax(dim=-1)).sum(dim=-1)
        ctx.save_for_backward(logits, entropies)
        ctx.temperature = temperature
        return entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """``-p (log p + H) / temperature``."""
        logits, entropies = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            probs = _scaled(logits[rows], ctx.temperature).softmax(dim=-1)
            slope = (grad_output[rows] / ctx.temperature)[:, None]
            grad_logits[rows] = torch.special.entr(probs).sub_(probs.mul_(entropies[rows, None])).mul_(slope)
        return grad_logits, None


def _precision(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits divided by the temperature in the precision of the computation, as a new tensor."""
    return logits.to(_precision(logits)) / temperature


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    rows, width = logits.shape
    return row_slices(rows, width, _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_ON_ACCELERATORS))


def _check(logits: Tensor, temperature: float) -> None:
    if logits.ndim != 2 or not temperature > 0:
        raise ValueError(f"logits must be [N, V] and the temperature > 0; got {list(logits.shape)} and {temperature}")


def interpolate_proximal(
    rollout_log_probs: Tensor,
    current_log_probs: Tensor,
    policy_versions: Tensor,
    proximal_version: int,
    current_version: int,
) -> Tensor:
    """``log pi_prox = (1 - a) log pi_rollout + a log pi_theta``, ``a = (v_prox - v_rollout) / (v_theta - v_rollout)`` in [0, 1].

    All ``[B, T]``, log-probs in nats; ``policy_versions`` int: version of the weights that sampled each token. ``a`` is 0 where
    the current weights sampled the token. No gradient flows through the result, which has the type of ``current_log_probs``.
    The approximation assumes that log-probs change linearly with the version (A-3PO, arXiv:2512.06547). When rollouts are never
    older than the proximal policy, as in synchronous training, ``a`` is 0 and the result is the rollout log-probs: bypass mode.
    Raises ``ValueError`` when shapes differ or ``proximal_version`` is above ``current_version``.
    """
    if not rollout_log_probs.shape == current_log_probs.shape == policy_versions.shape:
        raise ValueError(
            "rollout_log_probs, current_log_probs and policy_versions must have one shape [B, T]; got "
            f"{list(rollout_log_probs.shape)}, {list(current_log_probs.shape)} and {list(policy_versions.shape)}"
        )
    if proximal_version > current_version:
        raise ValueError(f"proximal_version must not be above current_version={current_version}; got {proximal_version}")
    dtype = torch.promote_types(current_log_probs.dtype, torch.float32)
    rollout, current = rollout_log_probs.detach().to(dtype), current_log_probs.detach().to(dtype)
    updates = (current_version - policy_versions).to(dtype)
    share = ((proximal_version - policy_versions).to(dtype) / updates.clamp_min(1.0)).clamp(0.0, 1.0)
    mixed = torch.lerp(rollout, current, share)
    return torch.where(share == 0, rollout, mixed).to(current_log_probs.dtype)
