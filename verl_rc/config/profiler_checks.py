"""Checks of ``global_profiler.*``."""

from collections.abc import Iterator

from verl_rc.config.profiler import places
from verl_rc.config.run import RunConfig


def check_profiler(config: RunConfig) -> Iterator[str]:
    """What of the profiler does not fit the run."""
    profiler = config.global_profiler
    if profiler.tool is None:
        return
    if not profiler.steps:
        yield "global_profiler.tool=torch needs global_profiler.steps, e.g. [2]; got none."
    if not profiler.ranks and not profiler.engines:
        yield (
            "global_profiler.tool=torch must profile a process, but global_profiler.ranks and .engines name "
            "none: write ranks=[0], or drop tool."
        )
    for key, chosen, number in (
        ("ranks", profiler.ranks, config.num_ranks),
        ("engines", profiler.engines, config.num_engines),
    ):
        if max(places(chosen, number), default=0) >= number:
            yield f"global_profiler.{key} must be below the run's {number} {key}, got {chosen}."
