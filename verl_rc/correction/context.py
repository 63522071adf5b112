"""What diagnostics may know about rows besides their log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.correction.chunks import RowChunk, RowChunks

NUM_AGES = 5
"""Token ages are told apart up to ``NUM_AGES - 1`` updates, which stands for all older ones too."""

NUM_TURNS = 5
"""Turns between tools' answers are told apart up to the last of these, which stands for all later ones too."""


@dataclass(frozen=True)
class RowContext:
    """Optional facts about the rows of a batch; full diagnostics split their numbers by them."""

    group_slots: Tensor | None = None
    """int64 ``[B]``: rows of one prompt share a number in [0, B)."""
    policy_versions: Tensor | None = None
    """int64 ``[B, T]``, or ``[B]`` where a row has one: version of the weights that sampled a token."""
    current_version: Tensor | int | None = None
    """The version ages count from; None: ages are unknown."""
    advantages: Tensor | None = None
    """``[B, T]``."""
    scores: Tensor | None = None
    """``[B]``: outcome scores; above 0 is correct."""

    def of(self, chunk: RowChunk) -> "RowContext":
        """The token-level facts of some rows."""
        return RowContext(
            policy_versions=None if self.policy_versions is None else chunk.of(self.policy_versions),
            current_version=self.current_version,
            advantages=None if self.advantages is None else chunk.of(self.advantages),
        )

    def ages(self, response_mask: Tensor) -> Tensor | None:
        """int64 ``[B, T]``: updates since the weights that sampled each token; 0 outside ``response_mask``; None if unknown."""
        if self.policy_versions is None or self.current_version is None:
            return None
        versions = _per_token(self.policy_versions, response_mask)
        return torch.where(response_mask, self.current_version - versions, 0)

    def check(self, shape: torch.Size) -> None:
        """Raise ``ValueError`` unless every fact fits rows of log-probs ``[B, T]``."""
        wanted = {
            "advantages": (self.advantages, (shape,)),
            "policy_versions": (self.policy_versions, (shape, shape[:1])),
            "scores": (self.scores, (shape[:1],)),
            "group_ids": (self.group_slots, (shape[:1],)),
        }
        for name, (value, shapes) in wanted.items():
            if value is not None and value.shape not in shapes:
                expected = " or ".join(str(list(one)) for one in shapes)
                raise ValueError(f"{name} must have shape {expected}, like the log-probs; got {list(value.shape)}")


def newest_version(policy_versions: Tensor, response_mask: Tensor) -> Tensor:
    """The newest version among the response tokens, an int64 scalar still on its device."""
    lowest = torch.iinfo(torch.int64).min
    newest = torch.full((), lowest, dtype=torch.int64, device=policy_versions.device)
    for chunk in RowChunks.of(response_mask):
        mask = chunk.of(response_mask).bool()
        seen = torch.where(mask, _per_token(chunk.of(policy_versions), mask), lowest)
        newest = torch.maximum(newest, seen.amax()) if seen.numel() else newest
    return newest


def _per_token(versions: Tensor, response_mask: Tensor) -> Tensor:
    return versions if versions.ndim == 2 else versions[:, None].expand_as(response_mask)


def group_slots(group_ids: Tensor | Sequence[str] | Sequence[int], device: torch.device) -> Tensor:
    """int64 ``[B]``: a number in [0, B) for each row, the same for rows whose id is the same. No host sync for tensors."""
    if not isinstance(group_ids, Tensor):
        numbers: dict[str | int, int] = {}
        return torch.tensor([numbers.setdefault(group, len(numbers)) for group in group_ids], dtype=torch.int64, device=device)
    ordered, order = group_ids.to(device).sort()
    starts = torch.zeros_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).long()
    slots = torch.empty_like(starts)
    slots[order] = starts.cumsum(dim=0)
    return slots
