"""What diagnostics may know about rows besides their log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_AGES = 5
"""Token ages are told apart up to ``NUM_AGES - 1`` updates, which stands for all older ones too."""


@dataclass(frozen=True)
class RowContext:
    """Optional facts about the rows of a batch; full diagnostics split their numbers by them."""

    group_slots: Tensor | None = None
    """int64 ``[B]``: rows of one prompt share a number in [0, B)."""
    ages: Tensor | None = None
    """int64 ``[B, T]``: updates between the weights that sampled a token and the newest ones."""
    advantages: Tensor | None = None
    """``[B, T]``."""
    scores: Tensor | None = None
    """``[B]``: outcome scores; above 0 is correct."""

    def rows(self, where: slice) -> "RowContext":
        """The token-level facts of some rows."""
        return RowContext(
            ages=None if self.ages is None else self.ages[where],
            advantages=None if self.advantages is None else self.advantages[where],
        )


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


def version_ages(policy_versions: Tensor, response_mask: Tensor, current_version: int | None) -> Tensor:
    """int64 ``[B, T]``: updates since the weights that sampled each token; 0 outside ``response_mask``.

    ``policy_versions`` is ``[B, T]`` (or ``[B]``: one version a row). Ages count from ``current_version``, or, where that is
    not given, from the newest version among the tokens.
    """
    versions = policy_versions if policy_versions.ndim == 2 else policy_versions[:, None].expand_as(response_mask)
    mask = response_mask.bool()
    seen = torch.where(mask, versions, torch.iinfo(torch.int64).min)
    newest = seen.amax() if current_version is None and seen.numel() else current_version
    return torch.zeros_like(versions) if newest is None else torch.where(mask, newest - versions, 0)
