"""Facts about the sequences of a batch besides their log-probs."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

_OF_ROWS = ("group_slots", "scores", "engines")


@dataclass(frozen=True)
class SequenceContext:
    """Facts about sequences besides their log-probs, for diagnostics and rules.

    Statistics are split by age where ages are known, and with full diagnostics by all other facts too.
    """

    group_slots: Tensor | None = None
    """int64 ``[B]``: sequences of one prompt share a number in [0, B)."""
    policy_versions: Tensor | None = None
    """int64 ``[B, T]``, or ``[B]`` where a sequence has one: version of the weights that sampled a token."""
    current_version: Tensor | int | None = None
    """The version ages count from; None: ages are unknown."""
    advantages: Tensor | None = None
    """``[B, T]``."""
    scores: Tensor | None = None
    """``[B]``: outcome scores; above 0 is correct."""
    entropies: Tensor | None = None
    """``[B, T]``, nats: entropy of the train policy's distribution at each token."""
    sum_pi_squared: Tensor | None = None
    """``[B, T]``: sum of the squares of its probabilities."""
    varentropies: Tensor | None = None
    """``[B, T]``, nats^2: variance of the log-prob of a token drawn from it."""
    engines: Tensor | None = None
    """int64 ``[B]``: number of the engine that sampled a sequence."""
    by_turn: bool = True
    """Whether statistics are split by turn, too: not where each sequence has one."""

    def map(
        self, *, of_rows: Callable[[Tensor], Tensor], of_tokens: Callable[[Tensor], Tensor]
    ) -> "SequenceContext":
        """The facts of some sequences: ``of_rows`` of those ``[B]``, ``of_tokens`` of the others."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        changes: dict[str, Any] = {
            name: (of_rows if name in _OF_ROWS else of_tokens)(column)
            for name, column in columns.items()
            if column is not None and name not in ("current_version", "by_turn")
        }
        return replace(self, **changes)

    def ages(self, response: Tensor) -> Tensor | None:
        """int64 ``[B, T]``: versions since the weights that sampled each token; 0 outside ``response``; None
        if unknown."""
        if self.policy_versions is None or self.current_version is None:
            return None
        return torch.where(response, self.current_version - _per_token(self.policy_versions), 0)

    def check(self, train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> None:
        """Raise ``ValueError`` unless all three have one shape ``[B, T]``, and every fact that shape or
        ``[B]``."""
        shape = train_log_probs.shape
        if not shape == rollout_log_probs.shape == response_mask.shape or len(shape) != 2:
            raise ValueError(
                "train_log_probs, rollout_log_probs and response_mask must have one shape [B, T]; got "
                f"{list(shape)}, {list(rollout_log_probs.shape)} and {list(response_mask.shape)}"
            )
        tokens, rows = list(shape), list(shape[:1])
        for name, value, fitting in (
            ("advantages", self.advantages, [tokens]),
            ("policy_versions", self.policy_versions, [tokens, rows]),
            ("scores", self.scores, [rows]),
            ("group_ids", self.group_slots, [rows]),
            ("entropies", self.entropies, [tokens]),
            ("sum_pi_squared", self.sum_pi_squared, [tokens]),
            ("varentropies", self.varentropies, [tokens]),
            ("engines", self.engines, [rows]),
        ):
            if value is not None and list(value.shape) not in fitting:
                expected = " or ".join(map(str, fitting))
                raise ValueError(
                    f"{name} must have shape {expected}, like the log-probs; got {list(value.shape)}"
                )


def newest_version(policy_versions: Tensor, response_mask: Tensor) -> Tensor:
    """The newest version among the response tokens, an int64 scalar still on its device; without any the
    lowest there can be."""
    lowest = torch.iinfo(torch.int64).min
    versions = torch.where(response_mask.bool(), _per_token(policy_versions), lowest)
    return versions.amax() if versions.numel() else torch.full((), lowest, device=versions.device)


def _per_token(versions: Tensor) -> Tensor:
    return versions if versions.ndim == 2 else versions[:, None]
