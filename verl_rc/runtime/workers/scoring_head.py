"""A language model whose forward pass can end in scores of tokens instead of logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, gathered_rows, scores_from_hidden_states


@dataclass(frozen=True)
class PredictedTokens:
    """The tokens to be scored, and how."""

    positions: Tensor
    """int64 ``[K]``: positions of the hidden states that predict them, counted over all rows."""
    token_ids: Tensor
    """int64 ``[K]``."""
    options: ScoreOptions
    support_ids: Tensor | None = None
    """See ``scores_from_hidden_states``."""
    candidate_ids: Tensor | None = None
    """See ``scores_from_hidden_states``."""


def add_scoring(
    model: nn.Module,
    head_dtype: torch.dtype | None = None,
    score: Callable[..., HiddenStateScores] = scores_from_hidden_states,
) -> nn.Module:
    """The model, with a forward pass that returns ``HiddenStateScores`` for an argument ``predicted``.

    ``head_dtype`` is the precision of its logits. None means that of its hidden states. ``score`` takes the
    arguments of ``scores_from_hidden_states``. Raises ``ValueError`` when the logits are not a constant times
    a linear layer of the last hidden states.
    """
    causal_lm: Any = model
    plain_forward, factor = causal_lm.forward, _logit_factor(causal_lm)

    # The forward pass itself, not a function around it: FSDP's hooks gather the head's weight for the root's
    # forward only, and keep it until its gradient is there.
    def forward(*args: Any, predicted: PredictedTokens | None = None, **inputs: Any) -> Any:
        if predicted is None:
            return plain_forward(*args, **inputs)
        # PEFT passes arguments that it was not given as None.
        arguments = {name: value for name, value in inputs.items() if value is not None}
        hidden = causal_lm.base_model(*args, **arguments).last_hidden_state.flatten(0, 1)
        states = gathered_rows(hidden, predicted.positions)
        head, options = causal_lm.get_output_embeddings(), predicted.options
        return score(
            states if head_dtype is None else states.to(head_dtype),
            head.weight,
            predicted.token_ids,
            replace(options, temperature=options.temperature / factor),
            head.bias,
            predicted.support_ids,
            predicted.candidate_ids,
        )

    causal_lm.forward = forward
    return model


def _logit_factor(model: Any) -> float:
    """The constant by which the model multiplies the output of its head.

    A forward pass with a stub for body and head shows what the model does between the two, and after them.
    """
    problem = (
        "a policy's logits must be a constant times a linear layer of its last hidden states, so that "
        f"log-probs need only a chunk of them at a time, but {type(model).__name__}"
    )
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or not isinstance(head, nn.Linear):
        raise ValueError(f"{problem} has the output layer {type(head).__name__}. Train another model.")
    hidden, head_output = torch.arange(6.0).view(1, 2, 3), torch.linspace(-60.0, 60.0, 14).view(1, 2, 7)
    head_inputs = []

    def stub_head(states: Tensor) -> Tensor:
        head_inputs.append(states)
        return head_output.clone()

    stub_body = patch.object(body, "forward", lambda *_, **__: _BodyOutput(hidden))
    with stub_body, patch.object(head, "forward", stub_head):
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    factor = float(logits[0, 0, 0] / head_output[0, 0, 0])
    if (
        len(head_inputs) != 1
        or not torch.equal(head_inputs[0], hidden)
        or not torch.allclose(logits, factor * head_output)
    ):
        changes = {
            name: value for name, value in vars(model.config).items() if "logit" in name and value is not None
        }
        raise ValueError(
            f"{problem} changes them in another way (its config.json: {changes}). Train another model."
        )
    return factor


class _BodyOutput:
    """Last hidden states; every other output is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None
