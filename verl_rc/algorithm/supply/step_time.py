"""The time of an asynchronous step, and the largest staleness bound that is of use, from measured seconds."""

import math
from dataclasses import dataclass

from verl_rc.config.async_training import AsyncTrainingConfig


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds of one step's work on the devices that each side will have, one side alone."""

    sampling: float
    """Seconds from the first request to the last token of a batch: its longest response sets it."""
    training: float
    """Everything else."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless both are positive."""
        if not (0 < self.sampling < math.inf and 0 < self.training < math.inf):
            raise ValueError(
                f"sampling and training must take more than 0 seconds, got {self.sampling} and "
                f"{self.training}."
            )

    @property
    def in_turns(self) -> float:
        """Seconds of a synchronous step on the same devices."""
        return self.sampling + self.training

    def fastest(self, options: AsyncTrainingConfig) -> float:
        """Seconds below which a step cannot come.

        Whole responses end before the next publication. Responses that weights change under are sampled and
        trained on within ``options.oldest + 1`` steps.
        """
        if options.staleness == 0:
            return (
                self.in_turns
                if options.trigger_parameter_sync_step == 1
                else max(self.sampling, self.training)
            )
        if not options.partial_rollout:
            return max(self.sampling, self.training)
        return max(self.training, self.in_turns / (options.oldest + 1))

    def slowest(self, options: AsyncTrainingConfig) -> float:
        """Seconds that a step takes at most: the engines do one batch after the other."""
        return self.in_turns if options.staleness == 0 else max(self.sampling, self.training)

    def smallest_useful_staleness(self, options: AsyncTrainingConfig) -> int:
        """The smallest whole k that keeps the trainer busy, however many responses take as long as the
        longest."""
        return _smallest_staleness(self.sampling, self.training, options)


@dataclass(frozen=True)
class WaitTotals:
    """Seconds of the steps of a run so far. Immutable: ``with_step`` returns the next totals."""

    steps: int = 0
    total: float = 0.0
    waited: float = 0.0
    """Seconds in which the trainer waited for samples."""
    longest_group: float = 0.0
    """Seconds from the first request of a group to its last answer, the longest of all."""

    def with_step(self, total: float, waited: float, longest_group: float) -> "WaitTotals":
        """Return the totals with another step."""
        longest = max(self.longest_group, longest_group)
        return WaitTotals(self.steps + 1, self.total + total, self.waited + waited, longest)

    @property
    def step_without_waiting(self) -> float:
        """Seconds of a step, on average, less what it waited; ``steps`` must be > 0."""
        return (self.total - self.waited) / self.steps

    def smallest_useful_staleness(self, options: AsyncTrainingConfig) -> int:
        """The smallest whole k with which the trainer would not have waited; ``steps`` must be > 0."""
        return _smallest_staleness(self.longest_group, self.step_without_waiting, options)


def _smallest_staleness(longest: float, step: float, options: AsyncTrainingConfig) -> int:
    """The smallest k with which no step of ``step`` seconds waits for groups that take up to ``longest``
    seconds.

    The first groups that a publication admits are those of the step that begins ``k`` publications later.
    """
    if not options.partial_rollout:
        return 1  # whole responses end before the next publication
    return max(1, math.ceil(round(longest / (step * options.trigger_parameter_sync_step), 9)))
