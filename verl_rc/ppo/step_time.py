"""How long an asynchronous step takes, and how large a staleness bound is of use, from seconds measured apart."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from verl_rc.config.async_training import AsyncTrainingConfig

_SMALL_GAIN = 1.1
"""A step that is at most so many times as short is not worth devices of its own for both sides."""


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds of one step's work on the devices that each side will have, one side alone."""

    sampling: float
    """From the first request to the last token of a batch: its longest response sets it."""
    training: float
    """Everything else."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless both are positive."""
        if not (0 < self.sampling < math.inf and 0 < self.training < math.inf):
            raise ValueError(f"sampling and training must take more than 0 seconds, got {self.sampling} and {self.training}.")

    @property
    def in_turns(self) -> float:
        """Seconds of a synchronous step on the same devices."""
        return self.sampling + self.training

    def fastest(self, options: AsyncTrainingConfig) -> float:
        """Seconds below which a step cannot come.

        Whole responses end before the next publication. Responses that weights change under have ``k + 1`` publications' time.
        """
        if options.staleness == 0:
            return self.in_turns if options.trigger_parameter_sync_step == 1 else max(self.sampling, self.training)
        if not options.partial_rollout:
            return max(self.sampling, self.training)
        return max(self.training, self.sampling / float(1 + options.staleness))

    def slowest(self, options: AsyncTrainingConfig) -> float:
        """Seconds that a step takes at most: the engines do one batch after the other."""
        return self.in_turns if options.staleness == 0 else max(self.sampling, self.training)

    def smallest_useful_staleness(self, options: AsyncTrainingConfig) -> int:
        """The smallest whole k beyond which steps cannot get shorter."""
        if not options.partial_rollout:
            return 1
        return max(1, math.ceil(round(self.sampling / self.training, 9)) - 1)

    def prediction(self, options: AsyncTrainingConfig) -> Iterator[str]:
        """What a step takes, and what another k would change; in sentences."""
        low, high = self.fastest(options), self.slowest(options)
        seconds = f"{low:.3g} s" if math.isclose(low, high) else f"{low:.3g} to {high:.3g} s"
        yield (
            f"a step takes {seconds}, in turns {self.in_turns:.3g} s (sampling {self.sampling:.3g} s, training "
            f"{self.training:.3g} s, one side alone; publishing not counted)"
        )
        useful = self.smallest_useful_staleness(options)
        best = max(self.training, self.sampling / (1 + useful if options.partial_rollout else 1))
        if self.in_turns <= _SMALL_GAIN * best:
            slower = "sampling" if self.sampling > self.training else "training"
            yield (
                f"no staleness_threshold helps: {slower} takes {max(self.sampling, self.training) / self.in_turns:.0%} of a step "
                "in turns, so give that side more devices"
            )
        elif options.staleness < useful:
            yield f"staleness_threshold={useful} is the smallest that can keep the trainer busy; with less it waits for samples"
        elif options.staleness > useful:
            yield f"staleness_threshold={useful} is the smallest useful one: with more, tokens get older and steps no shorter"


_BUSY_SHARE = 0.02
"""A trainer that waits for no larger share of its time counts as busy."""


@dataclass(frozen=True)
class WaitTotals:
    """Seconds of the steps of a run so far. Immutable: ``with_step`` returns the next totals."""

    steps: int = 0
    total: float = 0.0
    waited: float = 0.0
    """In which the trainer waited for samples."""
    longest_group: float = 0.0
    """From the first request of a group to its last answer, the longest of all."""

    def with_step(self, total: float, waited: float, longest_group: float) -> "WaitTotals":
        """With another step."""
        longest = max(self.longest_group, longest_group)
        return WaitTotals(self.steps + 1, self.total + total, self.waited + waited, longest)

    def advice(self, options: AsyncTrainingConfig) -> str:
        """How long the trainer waited, and the smallest k that would have kept it busy; a sentence. ``steps`` must be > 0."""
        share, bound = self.waited / self.total, f"staleness_threshold={options.staleness_threshold:g}"
        waited = f"the trainer waited for samples {share:.0%} of the time with {bound}"
        needed, needs = 1, "whole responses never need more"
        if options.partial_rollout:
            alone = (self.total - self.waited) / self.steps
            needed = max(1, math.ceil(self.longest_group / alone) - 1)
            needs = f"the slowest prompt took {self.longest_group:.3g} s, a step without waiting {alone:.3g} s"
        if options.staleness < needed and share > _BUSY_SHARE:
            return f"{waited}; {needed} would have kept it busy: {needs}"
        if share > _BUSY_SHARE:
            return f"{waited}; engines are the slower side: more devices for them help, a larger bound does not"
        if options.staleness > needed:
            return f"{waited}; {needed} would have kept it busy too, with younger tokens: {needs}"
        return waited
