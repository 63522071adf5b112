"""A batch of responses with their scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_rc.records.batches import RolloutBatch
from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Reply
from verl_rc.records.ragged import Ragged


@dataclass(frozen=True)
class ScoredBatch:
    """Responses and their scores, row by row, with all samples of each prompt. ``B`` rows."""

    rollouts: Ragged[RolloutBatch]
    scores: Tensor
    """float32 ``[B]``: outcome scores, including the overlong penalty if enabled."""
    prompts: list[PromptRow] = field(default_factory=list)
    """The prompts, indexed by ``rollouts.group_ids``. Prompts, texts and extras may be empty: no loss or
    metric of the update reads them."""
    texts: list[str] = field(default_factory=list)
    """``B`` decoded responses."""
    extras: dict[str, list[object]] = field(default_factory=dict)
    """Further columns of ``B`` values returned by the reward function, e.g. ``acc``."""
    episodes: Sequence[Sequence[Reply]] = ()
    """The environment's replies to the turns of each of ``B`` responses; empty without an environment."""
    reward_baselines: Tensor | None = None
    """float32 ``[B]``: score of the greedy response to each row's prompt; None unless the estimator is
    ``remax``."""
    component_scores: Tensor | None = None
    """float32 ``[B, K]``: the parts of the reward named by ``algorithm.gdpo_reward_keys``; None unless the
    estimator is ``gdpo``."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` naming the field whose dtype or length does not fit the rollouts."""
        rows = len(self)
        for name, dimensions in (("scores", 1), ("reward_baselines", 1), ("component_scores", 2)):
            value: Tensor | None = getattr(self, name)
            if value is not None and (
                value.dtype != torch.float32 or value.ndim != dimensions or len(value) != rows
            ):
                raise ValueError(
                    f"ScoredBatch.{name} must be torch.float32 of shape {[rows, 'K'][:dimensions]}, got "
                    f"{value.dtype} of shape {list(value.shape)}."
                )
        columns: dict[str, Sequence[object]] = {
            f"extras[{name!r}]": column for name, column in self.extras.items()
        }
        columns |= {name: column for name in ("texts", "episodes") if (column := getattr(self, name))}
        for name, column in columns.items():
            if len(column) != rows:
                raise ValueError(
                    f"ScoredBatch.{name} must have one value for each of {rows} rows, got {len(column)}."
                )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rollouts)

    @property
    def rows(self) -> list[PromptRow]:
        """The prompt of every row."""
        return [self.prompts[group] for group in self.rollouts.group_ids.tolist()]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy produced."""
        return int(torch.count_nonzero(self.rollouts.response_mask))

    def accuracies(self) -> list[float]:
        """``acc`` of every sample; its score when the reward function returns no ``acc``."""
        accuracies = self.extras.get("acc", [None] * len(self))
        pairs = zip(accuracies, self.scores.tolist(), strict=True)
        return [score if accuracy is None else float(str(accuracy)) for accuracy, score in pairs]
