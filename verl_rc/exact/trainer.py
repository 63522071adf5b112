"""The trainer's side: values of the engine's operations, gradients of the ordinary ones."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.exact import hold_sums
from verl_rc.exact.capture import ACTIVATION
from verl_rc.exact.operations import linear, require_rows_alone, whole_vectors
from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, scores_from_hidden_states
from verl_rc.tensor_ops.logprobs import LOGITS_AT_ONCE
from verl_rc.tensor_ops.masked import row_slices

Attention = Callable[..., tuple[Tensor, None]]
"""As transformers calls it."""


class _ValueOf(torch.autograd.Function):
    """The first tensor's value, the second's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiable: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def exact_attention(ordinary: Attention) -> Attention:
    """The engine's attention, with the gradient of ``ordinary``, over packed or padded sequences."""
    # By its name: a trainer without exact mode runs where vLLM is not installed.
    kernels = import_module("verl_rc.exact.cpu_kernels")
    kernels.require_vllm()

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if options.get("dropout"):
            raise ValueError(
                f"exact mode needs a model without dropout, got attention_dropout={options['dropout']}."
            )
        output, _ = ordinary(module, query, key, value, attention_mask, scaling, **options)
        (rows, _, width, _), layout = query.shape, options.get("packed_layout")
        lengths = torch.full((rows,), width) if layout is None else layout.boundaries.diff()
        flat = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in (query, key, value))
        attended = kernels.attend(*flat, lengths.long(), scaling)
        return _ValueOf.apply(attended.view(output.shape), output), None  # type: ignore[no-untyped-call]

    return attention


def exact_scores(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    options: ScoreOptions,
    bias: Tensor | None = None,
    kept_ids: Tensor | None = None,
) -> HiddenStateScores:
    """See ``scores_from_hidden_states``; the log-probs are ``torch.log_softmax``, as in vLLM's sampler.

    Filters are refused in exact mode, so ``kept_ids`` is None.
    """
    assert kept_ids is None
    scores = scores_from_hidden_states(hidden, weight, token_ids, options, bias)
    log_probs = torch.empty_like(scores.log_probs)
    with torch.no_grad():
        for rows in row_slices(len(hidden), len(weight), LOGITS_AT_ONCE):
            logits = linear(hidden[rows], weight, bias).float() / options.temperature
            log_probs[rows] = logits.log_softmax(-1).gather(-1, token_ids[rows, None])[:, 0]
    return scores._replace(log_probs=_ValueOf.apply(log_probs, scores.log_probs))  # type: ignore[no-untyped-call]


def compute_exactly(model: nn.Module, compute_dtype: torch.dtype) -> nn.Module:
    """Let linear layers and activations of ``model``, which computes in ``compute_dtype``, compute as the
    engine's do.

    Raises ``InexactError`` where this CPU's products depend on the batch.
    """
    hold_sums()
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    require_rows_alone({(layer.in_features, layer.out_features) for layer in layers}, compute_dtype)
    for layer in layers:
        layer.forward = partial(_forward, layer)
    for name, module in model.named_modules():
        if name.endswith(ACTIVATION):
            module.forward = partial(_activate, module.forward)
    return model


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _activate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(whole_vectors(x))[..., : x.shape[-1]]
