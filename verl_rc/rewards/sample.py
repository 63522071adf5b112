"""What a reward function is asked: one response, and what is known about its prompt."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reward processes start without torch, which the data package loads
    from verl_rc.data.dataset import PromptRow

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class RewardSample:
    """One response to be scored."""

    row_index: int
    """Place of the prompt among all rows of its files."""
    data_source: str
    """Which scorer judges the response."""
    ground_truth: Any
    """What the response is compared with."""
    extra_info: dict[str, Any]
    """Further fields of the row."""
    solution_str: str
    """The response as text."""
    reward_model_score: float | None = None
    """What the reward model says about the response; None without one."""

    @classmethod
    def of(cls, row: "PromptRow", solution_str: str, reward_model_score: float | None = None) -> "RewardSample":
        """The sample of a response to ``row``."""
        return cls(row.row_index, row.data_source, row.ground_truth, row.extra_info, solution_str, reward_model_score)

    def __str__(self) -> str:
        """The sample's name in messages."""
        return f"row {self.row_index} (data_source {self.data_source!r}, response {self.solution_str[:_SHOWN_CHARACTERS]!r})"
