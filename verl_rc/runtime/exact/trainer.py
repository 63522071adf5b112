"""The trainer's side: values of the engine's operations, gradients of the ordinary ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from verl_rc.runtime.exact import InexactError, fix_summation_order
from verl_rc.runtime.exact.capture import ACTIVATION
from verl_rc.runtime.exact.operations import (
    device_module,
    pad_to_vectors,
    require_batch_invariance,
    with_gradient_of,
)
from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, scores_from_hidden_states
from verl_rc.tensor_ops.logprobs import LOGITS_AT_ONCE
from verl_rc.tensor_ops.masked import row_slices

Attention = Callable[..., tuple[Tensor, None]]
"""An attention function of transformers' ``AttentionInterface``."""
_EXACT_ATTENTION = "verl_rc_exact"


def exact_attention(ordinary: Attention) -> Attention:
    """The engine's attention, with the gradient of ``ordinary``, over packed or padded sequences."""
    kernels = device_module("kernels")
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
        (rows, _, width, _), layout = query.shape, options.get("packed_layout")
        lengths = torch.full((rows,), width) if layout is None else layout.boundaries.diff()
        packed = (states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value))
        attended = kernels.attend(*packed, lengths.long(), scaling)
        return with_gradient_of(
            lambda: ordinary(module, query, key, value, attention_mask, scaling, **options)[0],
            attended.unflatten(0, (rows, width)),
        ), None

    return attention


def exact_scores(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    options: ScoreOptions,
    bias: Tensor | None = None,
    support_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
) -> HiddenStateScores:
    """See ``scores_from_hidden_states``; log-probs are a log-softmax of all logits, as in vLLM's sampler.

    ``support_ids`` and ``candidate_ids`` must be None: exact mode refuses sampling filters, and losses that
    read the log-probs of other tokens.
    """
    assert support_ids is candidate_ids is None
    kernels = device_module("kernels")
    scores = scores_from_hidden_states(hidden, weight, token_ids, options, bias)
    log_probs = torch.empty_like(scores.log_probs)
    with torch.no_grad():
        for rows in row_slices(len(hidden), len(weight), LOGITS_AT_ONCE):
            logits = kernels.linear(hidden[rows], weight, bias).float()
            # A tensor, as in vLLM: to divide by a number, a GPU multiplies by its inverse.
            logits /= logits.new_tensor(options.temperature)
            log_probs[rows] = kernels.log_softmax(logits).gather(-1, token_ids[rows, None])[:, 0]
    return scores._replace(log_probs=with_gradient_of(lambda: scores.log_probs, log_probs))


def use_engine_operations(model: nn.Module, compute_dtype: torch.dtype) -> nn.Module:
    """Replace attention, linear layers, activations and, on a GPU, norms by the engine's; returns ``model``.

    ``compute_dtype``: the precision of its products. Raises ``InexactError`` where exact mode does not
    support the installed vLLM, where this device's products depend on the batch, or where a norm multiplies
    by 1 + weight on a GPU.
    """
    config: Any = model.config
    ordinary = AttentionInterface()[config._attn_implementation]
    AttentionInterface.register(_EXACT_ATTENTION, exact_attention(ordinary))
    config._attn_implementation = _EXACT_ATTENTION
    kernels = device_module("kernels")
    fix_summation_order(kernels.DEVICE)
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    shapes = {(layer.in_features, layer.out_features) for layer in layers}
    require_batch_invariance(shapes, compute_dtype, kernels.linear, kernels.DEVICE)
    for layer in layers:
        layer.forward = partial(_multiply, layer, kernels.linear)
    for name, module in model.named_modules():
        if name.endswith(ACTIVATION):
            module.forward = partial(_activate, module.forward)
        elif name.endswith("norm") and kernels.normalise is not None:
            if not hasattr(module, "variance_epsilon"):  # Gemma's multiplies by 1 + weight
                raise InexactError(
                    f"exact mode on a GPU needs norms that multiply by their weight, but {name} is a "
                    f"{type(module).__name__}; drop actor_rollout_ref.exact."
                )
            module.forward = partial(_normalise, module, kernels.normalise, module.forward)
    return model


def _multiply(layer: nn.Linear, multiply: Callable[..., Tensor], x: Tensor) -> Tensor:
    return multiply(x, layer.weight, layer.bias)


def _activate(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return activation(pad_to_vectors(x))[..., : x.shape[-1]]


def _normalise(norm: Any, exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], x: Tensor) -> Tensor:
    return with_gradient_of(lambda: ordinary(x), exact(x, norm.weight, norm.variance_epsilon))
