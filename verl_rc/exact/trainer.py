"""The trainer's side: values of the engine's operations, gradients of the ordinary ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.exact import InexactError, hold_sums
from verl_rc.exact.capture import ACTIVATION
from verl_rc.exact.operations import of_this_device, require_rows_alone, value_of, whole_vectors
from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, scores_from_hidden_states
from verl_rc.tensor_ops.logprobs import LOGITS_AT_ONCE
from verl_rc.tensor_ops.masked import row_slices

Attention = Callable[..., tuple[Tensor, None]]
"""As transformers calls it."""


def exact_attention(ordinary: Attention) -> Attention:
    """The engine's attention, with the gradient of ``ordinary``, over packed or padded sequences."""
    kernels = of_this_device("kernels")
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
        flat = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in (query, key, value))
        attended = kernels.attend(*flat, lengths.long(), scaling)
        return value_of(
            attended.unflatten(0, (rows, width)),
            lambda: ordinary(module, query, key, value, attention_mask, scaling, **options)[0],
        ), None

    return attention


def exact_scores(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    options: ScoreOptions,
    bias: Tensor | None = None,
    kept_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
) -> HiddenStateScores:
    """See ``scores_from_hidden_states``; the log-probs are a whole log-softmax, as in vLLM's sampler.

    Filters, and losses that look at other tokens, are refused in exact mode: ``kept_ids`` and
    ``candidate_ids`` are None.
    """
    assert kept_ids is candidate_ids is None
    kernels = of_this_device("kernels")
    scores = scores_from_hidden_states(hidden, weight, token_ids, options, bias)
    log_probs = torch.empty_like(scores.log_probs)
    with torch.no_grad():
        for rows in row_slices(len(hidden), len(weight), LOGITS_AT_ONCE):
            logits = kernels.linear(hidden[rows], weight, bias).float()
            # As vLLM, by a tensor: a GPU divides by a number as it multiplies by the inverse.
            logits /= logits.new_tensor(options.temperature)
            log_probs[rows] = kernels.log_softmax(logits).gather(-1, token_ids[rows, None])[:, 0]
    return scores._replace(log_probs=value_of(log_probs, lambda: scores.log_probs))


def compute_exactly(model: nn.Module, compute_dtype: torch.dtype) -> nn.Module:
    """Let linear layers, activations and, on a GPU, norms of ``model``, which computes in ``compute_dtype``,
    compute as the engine's do.

    Raises ``InexactError`` where this device's products depend on the batch, or a norm is another than the
    engine's.
    """
    kernels = of_this_device("kernels")
    hold_sums(kernels.DEVICE)
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    shapes = {(layer.in_features, layer.out_features) for layer in layers}
    require_rows_alone(shapes, compute_dtype, kernels.linear, kernels.DEVICE)
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


def _activate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(whole_vectors(x))[..., : x.shape[-1]]


def _normalise(norm: Any, exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], x: Tensor) -> Tensor:
    return value_of(exact(x, norm.weight, norm.variance_epsilon), lambda: ordinary(x))
