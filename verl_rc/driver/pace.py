"""Whether a stage takes much longer than it did: said once, with what it may come from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_rc.cluster.placement import Placement
from verl_rc.driver.announce import say
from verl_rc.workers.host import usable_cores

_TIMES_LONGER = 10.0
_SHORTEST_SECONDS = 1.0
"""Shorter stages vary more than this by themselves."""


@dataclass(frozen=True)
class Pace:
    """Seconds of every stage when it first ran in this process."""

    first_seconds: Mapping[str, float] = field(default_factory=dict)
    told: bool = False
    """A slow stage was reported."""

    def observed(self, seconds: Mapping[str, float], step: int, placement: Placement) -> "Pace":
        """Log the slowest of the stages that took ten times their first step, once a run; returns the pace with this step."""
        first = {**seconds, **self.first_seconds}
        slowdown = {stage: taken / max(first[stage], 1e-9) for stage, taken in seconds.items() if taken >= _SHORTEST_SECONDS}
        slowest = max(slowdown, key=lambda stage: slowdown[stage], default=None)
        if self.told or slowest is None or slowdown[slowest] < _TIMES_LONGER:
            return Pace(first, self.told)
        say(
            "timing_s/%s took %.1f s in step %d and %.2f s when it first ran. %s",
            slowest,
            seconds[slowest],
            step,
            first[slowest],
            _likely_cause(os.getloadavg()[0], usable_cores(), placement),
        )
        return Pace(first, told=True)


def _likely_cause(load: float, cores: int, placement: Placement) -> str:
    if placement.device == "cpu" and load > 1.5 * cores:
        return (
            f"The load average is {load:.1f} on {cores} cores, of which an engine uses {placement.engine_threads} and a trainer "
            f"rank {placement.trainer_threads}: other programs take the cores. docs/troubleshooting.md, Slow, has what helps."
        )
    return f"The load average is {load:.1f} on {cores} cores: compare the lengths of prompts and responses of the two steps."
