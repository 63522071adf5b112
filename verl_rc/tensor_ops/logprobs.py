"""Log-probs of tokens and entropies of distributions from hidden states, a block of the vocabulary at a time;
interpolated log-probs of two policies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_rc.tensor_ops.masked import row_slices

P = ParamSpec("P")
R = TypeVar("R")

LOGITS_AT_ONCE = 1 << 24
"""Logits in a block on a CPU: enough for wide matrix products, too few to count beside the weights that have
so large a vocabulary."""
_GPU_SHARE = 100
"""A block of logits and its gradient take at most one part in so many of a GPU's memory. Each block reads all
hidden states again, so that larger blocks move fewer bytes."""
_LOWEST_LOGIT = -1000.0
"""The lowest difference from the maximum that is computed with: the probability is 0 there, in float64, too,
and its product with the difference 0 instead of NaN."""


def logits_at_once(gpu_bytes: int | None, itemsize: int) -> int:
    """Return the number of logits of ``itemsize`` bytes in a block; ``gpu_bytes`` is the GPU's memory, None
    on a CPU.

    All of a GPU's memory counts, not what is free: the size of a block changes the rounding, and a run must
    repeat.
    """
    return LOGITS_AT_ONCE if gpu_bytes is None else gpu_bytes // (_GPU_SHARE * 2 * itemsize)


@dataclass(frozen=True)
class ScoreOptions:
    """The scores that are computed for every predicted token."""

    temperature: float = 1.0
    """Logits are divided by it."""
    entropies: bool = False
    entropy_gradient: bool = True
    """Whether entropies carry a gradient."""
    sum_pi_squared: bool = False
    top_tokens: int = 0
    """Number of most likely tokens that are returned at each place."""


class HiddenStateScores(NamedTuple):
    """Scores of K predicted tokens under ``p = softmax(logits / temperature)``, over the support where a
    token has such a set. None means not asked for."""

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
    candidate_log_probs: Tensor | None
    """``log p[candidate]``, nats ``[K, W]``, with gradient; -inf for ids that the vocabulary lacks."""
    top_ids: Tensor | None
    """int64 ``[K, W]``, without gradient: the most likely tokens, the first of them first; all where they are
    fewer than ``top_tokens``."""
    top_log_probs: Tensor | None
    """``log p`` of these, nats ``[K, W]``, without gradient."""


def scores_from_hidden_states(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    options: ScoreOptions,
    bias: Tensor | None = None,
    support_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
) -> HiddenStateScores:
    """Scores of tokens whose logits are ``hidden @ weight.T + bias``, in float32 (float64 for float64 hidden
    states).

    The logits of all tokens never exist at once: both passes take a block of the vocabulary at a time, so
    that each reads the weights once, and the backward pass computes the logits again. Logits that fit into
    one block are stored instead. On a GPU what is computed of a block is compiled: its logits are read twice
    (maximum, sums) in the forward and once in the backward pass, and stay in the precision of ``hidden``.

    Args:
        hidden: ``[K, H]``.
        weight: ``[V, H]`` in the dtype of ``hidden``, or a narrower one, cast to it a block at a time.
        token_ids: int64 ``[K]``.
        options: What to compute.
        bias: ``[V]``, optional.
        support_ids: int64 ``[K, W]``, optional: the tokens that each could be drawn from, padded with -1;
            all other logits count as -inf. A token without any was drawn from the whole vocabulary.
        candidate_ids: int64 ``[K, W]``, optional: other tokens in the place of each, none of them twice.

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
    for name, sets in (("support_ids", support_ids), ("candidate_ids", candidate_ids)):
        if sets is not None and (sets.ndim != 2 or len(sets) != len(hidden)):
            raise ValueError(
                f"{name} must be [K, W] for hidden states [K, H]; got {list(sets.shape)}, "
                f"{list(hidden.shape)}"
            )
    ids = token_ids[:, None]
    if candidate_ids is not None:
        ids = torch.cat([ids, candidate_ids], dim=-1)
    scores = _HiddenStateScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, ids, support_ids, options
    )
    return HiddenStateScores(*scores)


class _VocabularySums(NamedTuple):
    """Sums over the vocabulary of ``e = exp(x)``, where ``x`` is a scaled logit minus the maximum; ``[K]``
    each."""

    maxima: Tensor
    exponentials: Tensor
    """``sum e``."""
    logits: Tensor | None
    """``sum e x``; None, as below: not asked for."""
    squared_logits: Tensor | None
    """``sum e x^2``."""
    squares: Tensor | None
    """``sum e^2``."""

    def add(self, other: "_VocabularySums") -> "_VocabularySums":
        """Return the sums over the tokens of both."""
        maxima = torch.maximum(self.maxima, other.maxima)
        left, right = self._with_maxima(maxima), other._with_maxima(maxima)
        return _VocabularySums(
            maxima,
            left.exponentials + right.exponentials,
            _total(left.logits, right.logits),
            _total(left.squared_logits, right.squared_logits),
            _total(left.squares, right.squares),
        )

    def _with_maxima(self, maxima: Tensor) -> "_VocabularySums":
        """Return the sums for other maxima, none of which is lower."""
        shift = (self.maxima - maxima).clamp_min_(_LOWEST_LOGIT)
        factor, logits, squared_logits, squares = shift.exp(), self.logits, self.squared_logits, self.squares
        # sum e (x + shift)^2, whose three terms are >= 0, and sum e (x + shift), whose two are <= 0: nothing
        # cancels.
        if logits is not None and squared_logits is not None:
            squared_logits = (squared_logits + shift * (2 * logits + shift * self.exponentials)) * factor
        if logits is not None:
            logits = (logits + shift * self.exponentials) * factor
        if squares is not None:
            squares = squares * factor.square()
        return _VocabularySums(maxima, self.exponentials * factor, logits, squared_logits, squares)


def _total(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    return None if left is None or right is None else left + right


class _HiddenStateScores(torch.autograd.Function):
    """Saves the hidden states, the weights, and at most four numbers a token: log-prob, maximum, sum of the
    softmax, mean of the logits; and the log-probs of the candidates. ``ids`` ``[K, N]`` are each token and,
    behind it, its candidates."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        support_ids: Tensor | None,
        options: ScoreOptions,
    ) -> tuple[Tensor | None, ...]:
        sum_block, sums = _fused(_sum_block, hidden.device), None
        token_logits = hidden.new_full(ids.shape, -torch.inf, dtype=_precision(hidden))
        top = None
        for block in _vocabulary_blocks(hidden, weight):
            logits = _logits(hidden, weight[block], bias, block, support_ids)
            token_logits = _gathered(logits, ids, block, options.temperature, token_logits)
            if options.top_tokens:
                top = _largest(logits, block, options, top)
            block_sums = sum_block(logits, options.temperature, options.entropies, options.sum_pi_squared)
            sums = block_sums if sums is None else sums.add(block_sums)
        assert sums is not None
        maxima, totals, log_totals = sums.maxima, sums.exponentials, sums.exponentials.log()
        log_probs = token_logits.sub_(maxima[:, None]).sub_(log_totals[:, None])
        top_ids = top_log_probs = None
        if top is not None:
            top_ids, top_log_probs = top[1], top[0].sub_(maxima[:, None]).sub_(log_totals[:, None])
        entropies = squares = varentropies = means = None
        if sums.logits is not None:
            means = sums.logits / totals
            entropies = log_totals - means
        if sums.squares is not None:
            squares = sums.squares / totals.square()
        if means is not None and sums.squared_logits is not None:
            varentropies = (sums.squared_logits / totals).sub_(means.square()).clamp_min_(0.0)
        all_logits = logits if logits.shape[1] == weight.shape[0] else None
        if not options.entropy_gradient:
            means = None
        ctx.save_for_backward(
            hidden, weight, bias, all_logits, ids, log_probs, maxima, totals, means, support_ids
        )
        ctx.temperature = options.temperature
        constants = [squares, varentropies, top_ids, top_log_probs]
        constants += [] if options.entropy_gradient else [entropies]
        ctx.mark_non_differentiable(*(values for values in constants if values is not None))
        candidates = log_probs[:, 1:].clone() if ids.shape[1] > 1 else None
        return log_probs[:, 0].clone(), entropies, squares, varentropies, candidates, top_ids, top_log_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor | None, *further: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute gradients of logits: ``(onehot(token) - p) / temperature`` and ``-p (log p + H) /
        temperature``.

        With ``x``, the sums ``S`` of ``exp(x)`` and the means ``m`` of ``x``, ``log p + H = x - m``: the
        gradient is ``exp(x) (c + d x)`` with two numbers a token, except at the token itself and at the
        candidates.
        """
        hidden, weight, bias, all_logits, ids, log_probs, maxima, totals, means, support_ids = (
            ctx.saved_tensors
        )
        _squares, _varentropies, grad_candidates, *_ = further
        slopes = grad_log_probs[:, None] / ctx.temperature
        slopes_of_all = slopes[:, 0]
        if grad_candidates is not None:
            other_slopes = grad_candidates / ctx.temperature
            slopes_of_all = slopes_of_all + other_slopes.sum(dim=-1)
            # A candidate that is the token is written after it, with the slopes of both.
            other_slopes += torch.where(ids[:, 1:] == ids[:, :1], slopes, 0)
            slopes = torch.cat([slopes, other_slopes], dim=-1)
        constants, factors, entropy_slopes = -slopes_of_all / totals, None, None
        if means is not None:
            entropy_slopes = grad_entropies / ctx.temperature
            constants += entropy_slopes * means / totals
            factors = -entropy_slopes / totals
        grad_tokens = _token_gradients(slopes, log_probs, slopes_of_all, totals, means, entropy_slopes)
        differentiate = _fused(_differentiate, hidden.device)
        grad_hidden = None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        # Each row of the weight's gradient is one sum over all tokens, as if there were no blocks, and is
        # rounded once. Only the gradient of the hidden states is added up, in the higher precision.
        for block in _vocabulary_blocks(hidden, weight):
            block_weight = weight[block].to(hidden.dtype)
            logits = (
                _logits(hidden, block_weight, bias, block, support_ids) if all_logits is None else all_logits
            )
            grad_logits = differentiate(logits, ctx.temperature, maxima, constants, factors)
            # One after the other: tokens outside the block have the same nearest place.
            for column in range(ids.shape[1]):
                places, is_inside = _places(ids[:, column : column + 1], block)
                grad_nearest = grad_logits.gather(-1, places)
                grad_token = grad_tokens[:, column : column + 1].to(grad_logits.dtype)
                grad_logits.scatter_(-1, places, torch.where(is_inside, grad_token, grad_nearest))
            if ctx.needs_input_grad[0]:
                grad_hidden = _add_product(grad_hidden, grad_logits, block_weight)
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[block])
            elif grad_weight is not None:
                grad_weight[block] = grad_logits.t() @ hidden
            if grad_bias is not None:
                grad_bias[block] = grad_logits.sum(dim=0)
            del logits, grad_logits  # before the next block's: two blocks are alive at once, not three
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _token_gradients(
    slopes: Tensor,
    log_probs: Tensor,
    slopes_of_all: Tensor,
    totals: Tensor,
    means: Tensor | None,
    entropy_slopes: Tensor | None,
) -> Tensor:
    """Gradients of the logits of single tokens, from their ``log_probs`` and the loss's ``slopes`` by these,
    ``[K, N]``; ``slopes_of_all`` ``[K]`` are sums over the tokens of a row."""
    # 1 - p, where p is close to 1, has the digits that p in 16 bits has lost.
    gradients = -slopes * torch.expm1(log_probs) - (slopes_of_all[:, None] - slopes) * log_probs.exp()
    if means is None or entropy_slopes is None:
        return gradients
    below = log_probs.clamp_min(_LOWEST_LOGIT)
    differences = below + totals.log()[:, None] - means[:, None]
    return gradients - entropy_slopes[:, None] * below.exp() * differences


def _logits(
    hidden: Tensor, block_weight: Tensor, bias: Tensor | None, block: slice, support_ids: Tensor | None
) -> Tensor:
    """Logits of a block of the vocabulary in the dtype of the hidden states; -inf for tokens that the filter
    removed."""
    dtype = hidden.dtype
    logits = F.linear(hidden, block_weight.to(dtype), None if bias is None else bias[block].to(dtype))
    if support_ids is None:
        return logits
    # One column more, for tokens of the support that are not in this block.
    in_support = torch.zeros(len(hidden), logits.shape[1] + 1, dtype=torch.bool, device=hidden.device)
    is_inside = (support_ids >= block.start) & (support_ids < block.stop)
    in_support.scatter_(1, torch.where(is_inside, support_ids - block.start, logits.shape[1]), True)
    is_unfiltered = (support_ids < 0).all(dim=-1, keepdim=True)
    return logits.masked_fill_(~(in_support[:, :-1] | is_unfiltered), -torch.inf)


def _sum_block(
    logits: Tensor, temperature: float, with_entropies: bool, with_squares: bool
) -> _VocabularySums:
    """Sums over a block of the vocabulary, from its logits ``[K, block]``."""
    scaled = _scaled(logits, temperature)
    # A token may have no probability in this block: the difference must not be inf - inf.
    maxima = scaled.amax(dim=-1).clamp_min_(torch.finfo(scaled.dtype).min)
    if not with_entropies:
        exponentials = _below_maxima(scaled, maxima).exp_()
        squares = exponentials.square().sum(dim=-1) if with_squares else None
        return _VocabularySums(maxima, exponentials.sum(dim=-1), None, None, squares)
    below = _below_maxima(scaled, maxima).clamp_min_(_LOWEST_LOGIT)
    exponentials = below.exp()
    totals = exponentials.sum(dim=-1)
    squares = exponentials.square().sum(dim=-1) if with_squares else None
    products = exponentials.mul_(below)
    sums = products.sum(dim=-1)
    squared_logits = products.mul_(below).sum(dim=-1) if with_squares else None
    return _VocabularySums(maxima, totals, sums, squared_logits, squares)


def _differentiate(
    logits: Tensor, temperature: float, maxima: Tensor, constants: Tensor, factors: Tensor | None
) -> Tensor:
    """``exp(x) (constants + factors x)`` in the precision of the logits ``[K, block]``."""
    below = _below_maxima(_scaled(logits, temperature), maxima)
    if factors is None:
        return below.exp_().mul_(constants[:, None]).to(logits.dtype)
    below = below.clamp_min_(_LOWEST_LOGIT)
    exponentials = below.exp()
    slopes = below.mul_(factors[:, None]).add_(constants[:, None])
    return exponentials.mul_(slopes).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits divided by the temperature in the precision of the computation, as a new tensor."""
    return logits.to(_precision(logits)) / temperature


def _below_maxima(scaled: Tensor, maxima: Tensor) -> Tensor:
    """``scaled - maxima`` of each row, in place."""
    # exp(scaled - logsumexp) would have the rounding error of a number as large as the logits.
    return scaled.sub_(maxima[:, None])


def _places(ids: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Columns ``[K, N]`` of tokens in a block of the vocabulary, or the nearest ones, and bool ``[K, N]``:
    which are in it."""
    places = ids - block.start
    columns = places.clamp(0, block.stop - block.start - 1)
    return columns, columns == places


def _gathered(logits: Tensor, ids: Tensor, block: slice, temperature: float, token_logits: Tensor) -> Tensor:
    """``token_logits`` ``[K, N]``, with the scaled logits of those of ``ids`` that are in the block."""
    places, is_inside = _places(ids, block)
    return torch.where(is_inside, _scaled(logits.gather(-1, places), temperature), token_logits)


def _largest(
    logits: Tensor, block: slice, options: ScoreOptions, top: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The largest scaled logits ``[K, top_tokens]`` of a block and of ``top``, those of the blocks before;
    and their ids."""
    values, ids = logits.topk(min(options.top_tokens, logits.shape[1]), dim=-1)
    values, ids = _scaled(values, options.temperature), ids + block.start
    if top is None:
        return values, ids
    values, ids = torch.cat([top[0], values], dim=-1), torch.cat([top[1], ids], dim=-1)
    values, places = values.topk(min(options.top_tokens, values.shape[1]), dim=-1)
    return values, ids.gather(-1, places)


def _vocabulary_blocks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Blocks of the vocabulary whose logits exist at once."""
    elements = logits_at_once(_gpu_bytes(hidden.device), hidden.dtype.itemsize)
    return row_slices(weight.shape[0], hidden.shape[0], elements)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, in place, in the precision of sums."""
    if total is None:
        return (left @ right).to(_precision(left))
    # addmm_ needs no memory for the product, but has one dtype.
    return total.addmm_(left, right) if left.dtype == total.dtype else total.add_(left @ right)


def _precision(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


@cache
def _gpu_bytes(device: torch.device) -> int | None:
    """Memory of the GPU; None of another device."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def _fused(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The function as it is, or on a GPU compiled: there only its inputs and results pass through memory."""
    return function if _gpu_bytes(device) is None else _compiled(function)


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    # dynamic: the sizes of batch and block differ from call to call. 0 and 1 are compiled on their own, as
    # are options, more often than the default limit of 8 allows.
    compiled: Callable[P, R] = torch.compile(  # type: ignore[call-overload]  # whose overloads lack the limit
        function, dynamic=True, fullgraph=True, recompile_limit=64
    )
    return compiled


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
