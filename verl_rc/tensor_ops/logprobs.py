"""Log-probs of tokens and entropies of distributions from hidden states, in chunks; interpolated log-probs of
two policies."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_rc.tensor_ops.masked import row_slices

LOGITS_AT_ONCE = 1 << 24
"""Logits in a chunk: enough for wide matrix products, too few to count beside the weights that have so large
a vocabulary."""


@dataclass(frozen=True)
class ScoreOptions:
    """Which scores of every predicted token are computed."""

    temperature: float = 1.0
    """Logits are divided by it."""
    entropies: bool = False
    entropy_gradient: bool = True
    """Whether entropies carry a gradient."""
    sum_pi_squared: bool = False


class HiddenStateScores(NamedTuple):
    """Scores of K predicted tokens under ``p = softmax(logits / temperature)``; None: not asked for."""

    log_probs: Tensor
    """``log p[token]``, nats ``[K]``, with gradient."""
    entropies: Tensor | None
    """``-sum_v p_v log p_v``, nats ``[K]``; logits of -inf count as probability 0."""
    sum_pi_squared: Tensor | None
    """``sum_v p_v^2`` ``[K]`` in (0, 1], without gradient: the probability of drawing the same token twice.
    """
    varentropies: Tensor | None
    """``sum_v p_v (log p_v + entropy)^2``, nats^2 ``[K]``, without gradient: the variance of a drawn token's
    log-prob. Computed where both entropies and sums of squares are."""


def scores_from_hidden_states(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, options: ScoreOptions, bias: Tensor | None = None
) -> HiddenStateScores:
    """Scores of tokens whose logits are ``hidden @ weight.T + bias``, in float32 (float64 for float64 hidden
    states).

    The logits of all tokens never exist at once: the forward pass takes a chunk of the tokens at a time, the
    backward pass a chunk of the vocabulary, whose logits it computes again. Logits that fit into one chunk
    are kept instead.

    Args:
        hidden: ``[K, H]``.
        weight: ``[V, H]`` in the dtype of ``hidden``, in which logits are computed before they are cast.
        token_ids: int64 ``[K]``.
        options: What to compute.
        bias: ``[V]``, optional.

    Raises ``ValueError`` for other shapes or a temperature that is not positive.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden states must be [K, H] and weights [V, H]; got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if token_ids.shape != hidden.shape[:1]:
        raise ValueError(
            f"token_ids must be [K] for hidden states [K, H]; got {list(token_ids.shape)}, "
            f"{list(hidden.shape)}"
        )
    if not options.temperature > 0:
        raise ValueError(f"the temperature must be > 0; got {options.temperature}")
    found = _HiddenStateScores.apply(hidden, weight, bias, token_ids, options)  # type: ignore[no-untyped-call]
    return HiddenStateScores(*found)


class _HiddenStateScores(torch.autograd.Function):
    """Saves the hidden states, the weights, and three numbers a token: maximum and sum of the softmax,
    entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        log_probs, maxima, sums = (hidden.new_empty(tokens, dtype=_precision(hidden)) for _ in range(3))
        entropies = torch.empty_like(log_probs) if options.entropies else None
        squares = torch.empty_like(log_probs) if options.sum_pi_squared else None
        varentropies = None if entropies is None or squares is None else torch.empty_like(log_probs)
        for rows in row_slices(tokens, vocabulary, LOGITS_AT_ONCE):
            logits = F.linear(hidden[rows], weight, bias)
            scaled = _scaled(logits, options.temperature)
            maxima[rows] = scaled.amax(dim=-1)
            log_probs[rows] = scaled.gather(-1, token_ids[rows, None])[:, 0]
            exponentials = _exponentials(scaled, maxima[rows])
            sums[rows] = exponentials.sum(dim=-1)
            if entropies is not None or squares is not None:
                probs = exponentials.div_(sums[rows, None])
                if squares is not None:
                    squares[rows] = probs.square().sum(dim=-1)
                if entropies is not None:
                    terms = torch.special.entr(probs)
                    entropies[rows] = terms.sum(dim=-1)
                    if varentropies is not None:
                        # p (log p)^2 = (p log p)^2 / p, in place; where p is 0 both are.
                        squared_logs = terms.square_().div_(probs.clamp_min_(torch.finfo(probs.dtype).tiny))
                        varentropies[rows] = (
                            squared_logs.sum(dim=-1).sub_(entropies[rows].square()).clamp_min_(0.0)
                        )
        kept = logits if logits.shape[0] == tokens else None
        ctx.save_for_backward(hidden, weight, bias, token_ids, maxima, sums, entropies, kept)
        ctx.options = options
        constants = (
            [squares, varentropies] if options.entropy_gradient else [squares, varentropies, entropies]
        )
        ctx.mark_non_differentiable(*(values for values in constants if values is not None))
        return log_probs.sub_(maxima).sub_(sums.log()), entropies, squares, varentropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Compute gradients of logits: ``(onehot(token) - p) / temperature`` and ``-p (log p + H) /
        temperature``."""
        hidden, weight, bias, token_ids, maxima, sums, entropies, kept = ctx.saved_tensors
        temperature = ctx.options.temperature
        slope = (grad_log_probs / temperature)[:, None]
        grad_hidden = None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        # Chunks of the vocabulary: each row of the weight's gradient is one sum over all tokens, as if there
        # were no chunks, and is rounded once. Only the gradient of the hidden states is added up, in the
        # higher precision.
        for words in row_slices(weight.shape[0], hidden.shape[0], LOGITS_AT_ONCE):
            part = weight[words], None if bias is None else bias[words]
            logits = F.linear(hidden, *part) if kept is None else kept[:, words]
            exponentials = _exponentials(_scaled(logits, temperature), maxima)
            if ctx.options.entropies and ctx.options.entropy_gradient:
                probs = exponentials.div_(sums[:, None])
                of_entropy = torch.special.entr(probs).sub_(probs * entropies[:, None])
                grad_logits = of_entropy.mul_((grad_entropies / temperature)[:, None]).sub_(probs.mul_(slope))
            else:
                grad_logits = exponentials.mul_(-slope / sums[:, None])
            place = token_ids - words.start
            here = (place >= 0) & (place < logits.shape[1])
            grad_logits.scatter_add_(
                -1, torch.where(here, place, 0)[:, None], torch.where(here[:, None], slope, 0.0)
            )
            grad_logits = grad_logits.to(weight.dtype)
            if ctx.needs_input_grad[0]:
                grad_hidden = _add_product(grad_hidden, grad_logits, weight[words])
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[words])
            if grad_bias is not None:
                torch.sum(grad_logits, dim=0, out=grad_bias[words])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
        )


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, in place, in the precision of sums."""
    if total is None:
        return (left @ right).to(_precision(left))
    # addmm_ needs no memory for the product, but has one dtype.
    return total.addmm_(left, right) if left.dtype == total.dtype else total.add_(left @ right)


def _precision(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits divided by the temperature in the precision of the computation, as a new tensor."""
    return logits.to(_precision(logits)) / temperature


def _exponentials(scaled: Tensor, maxima: Tensor) -> Tensor:
    """``exp(scaled - maxima)`` of each row, in place."""
    # exp(scaled - logsumexp) would have the rounding error of a number as large as the logits.
    return scaled.sub_(maxima[:, None]).exp_()


def interpolate_proximal(
    rollout_log_probs: Tensor,
    current_log_probs: Tensor,
    policy_versions: Tensor,
    proximal_version: int,
    current_version: int,
) -> Tensor:
    """``log pi_prox = (1 - a) log pi_rollout + a log pi_theta``, ``a = (v_prox - v_rollout) / (v_theta -
    v_rollout)`` in [0, 1].

    All ``[B, T]``, log-probs in nats; ``policy_versions`` int: version of the weights that sampled each
    token. ``a`` is 0 where the current weights sampled the token. No gradient flows through the result, which
    has the type of ``current_log_probs``. The approximation assumes that log-probs change linearly with the
    version (A-3PO, arXiv:2512.06547). When rollouts are never older than the proximal policy, as in
    synchronous training, ``a`` is 0 and the result is the rollout log-probs: bypass mode. Raises
    ``ValueError`` when shapes differ or ``proximal_version`` is above ``current_version``.
    """
    if not rollout_log_probs.shape == current_log_probs.shape == policy_versions.shape:
        raise ValueError(
            "rollout_log_probs, current_log_probs and policy_versions must have one shape [B, T]; got "
            f"{list(rollout_log_probs.shape)}, {list(current_log_probs.shape)} and "
            f"{list(policy_versions.shape)}"
        )
    if proximal_version > current_version:
        raise ValueError(
            f"proximal_version must not be above current_version={current_version}; got {proximal_version}"
        )
    dtype = torch.promote_types(current_log_probs.dtype, torch.float32)
    rollout, current = rollout_log_probs.detach().to(dtype), current_log_probs.detach().to(dtype)
    updates = (current_version - policy_versions).to(dtype)
    share = ((proximal_version - policy_versions).to(dtype) / updates.clamp_min(1.0)).clamp(0.0, 1.0)
    mixed = torch.lerp(rollout, current, share)
    return torch.where(share == 0, rollout, mixed).to(current_log_probs.dtype)
