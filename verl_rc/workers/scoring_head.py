"""A language model whose forward pass can end in scores of tokens instead of logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, scores_from_hidden_states


@dataclass(frozen=True)
class PredictedTokens:
    """Which tokens are scored, and how."""

    positions: Tensor
    """int64 ``[K]``: where the hidden states lie that predict them, counted over all rows."""
    token_ids: Tensor
    """int64 ``[K]``."""
    options: ScoreOptions
    kept_ids: Tensor | None = None
    """See ``scores_from_hidden_states``."""
    candidate_ids: Tensor | None = None
    """See there."""


def add_scoring(
    model: nn.Module,
    head_dtype: torch.dtype | None = None,
    score: Callable[..., HiddenStateScores] = scores_from_hidden_states,
) -> nn.Module:
    """The model, whose forward pass returns ``HiddenStateScores`` when it is given ``predicted``.

    ``head_dtype`` is the precision of its logits; None: that of its hidden states. ``score`` takes the
    arguments of ``scores_from_hidden_states``.
    Raises ``ValueError`` when the logits are not a constant times a linear layer of the last hidden states.
    """
    causal_lm: Any = model
    plain_forward, factor = causal_lm.forward, _logit_factor(causal_lm)

    # The forward pass itself, not a function around it: FSDP's hooks gather the head's weight for the root's
    # forward only, and keep it until its gradient is there.
    def forward(*args: Any, predicted: PredictedTokens | None = None, **inputs: Any) -> Any:
        if predicted is None:
            return plain_forward(*args, **inputs)
        # PEFT passes arguments that it was not given as None.
        given = {name: value for name, value in inputs.items() if value is not None}
        hidden = causal_lm.base_model(*args, **given).last_hidden_state.flatten(0, 1)
        states = hidden.index_select(0, predicted.positions)
        head, options = causal_lm.get_output_embeddings(), predicted.options
        return score(
            states if head_dtype is None else states.to(head_dtype),
            head.weight,
            predicted.token_ids,
            replace(options, temperature=options.temperature / factor),
            head.bias,
            predicted.kept_ids,
            predicted.candidate_ids,
        )

    causal_lm.forward = forward
    return model


def _logit_factor(model: Any) -> float:
    """What the model multiplies the output of its head by.

    Found by a forward pass whose body and head are replaced: it shows what the model does between the two,
    and after them.
    """
    problem = (
        "a policy's logits must be a constant times a linear layer of its last hidden states, so that "
        f"log-probs need only a chunk of them at a time, but {type(model).__name__}"
    )
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or not isinstance(head, nn.Linear):
        raise ValueError(f"{problem} has the output layer {type(head).__name__}. Train another model.")
    hidden, logits, seen = torch.arange(6.0).view(1, 2, 3), torch.linspace(-60.0, 60.0, 14).view(1, 2, 7), []

    def stub_head(states: Tensor) -> Tensor:
        seen.append(states)
        return logits.clone()

    stub_body = patch.object(body, "forward", lambda *_, **__: _BodyOutput(hidden))
    with stub_body, patch.object(head, "forward", stub_head):
        found = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    factor = float(found[0, 0, 0] / logits[0, 0, 0])
    if len(seen) != 1 or not torch.equal(seen[0], hidden) or not torch.allclose(found, factor * logits):
        changes = {
            name: value for name, value in vars(model.config).items() if "logit" in name and value is not None
        }
        raise ValueError(
            f"{problem} changes them in another way (its config.json: {changes}). Train another model."
        )
    return factor


class _BodyOutput:
    """Last hidden states; everything else that a model may ask for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None
