"""Configuration of the profiler of single steps."""

from typing import Annotated, Literal

from pydantic import Field

from verl_rc.config.schema import StrictModel, UserPath

_Steps = list[Annotated[int, Field(ge=1)]]
_Places = list[Annotated[int, Field(ge=0)]] | Literal["all"]


class ProfilerConfig(StrictModel):
    """``global_profiler.*``: what trainer ranks and engines compute in single steps, operation by operation,
    as Chrome traces (docs/running.md)."""

    tool: Literal["torch"] | None = None
    """``torch``: torch's own profiler, never run on a GPU here; null: nothing is profiled."""
    steps: _Steps | None = None
    """Training steps that are profiled."""
    profile_continuous_steps: bool = False
    """One trace for steps that follow each other; False: one for each step."""
    save_path: UserPath | None = None
    """Folder of the traces; null: ``profile`` in the run's folder."""
    ranks: _Places = [0]
    """Trainer ranks that are profiled, each with all its models; ``all``: every rank."""
    engines: _Places = []
    """Engines that are profiled, likewise."""

    def window(self, step: int, last_step: int) -> tuple[int, int] | None:
        """First and last step of the trace that ``step`` belongs to; None where it is not profiled."""
        steps = self.steps or []
        if self.tool is None or step not in steps:
            return None
        first = last = step
        while self.profile_continuous_steps and first - 1 in steps:
            first -= 1
        while self.profile_continuous_steps and last + 1 in steps and last < last_step:
            last += 1
        return first, last


def places(chosen: list[int] | Literal["all"], number: int) -> list[int]:
    """The ranks or engines that ``chosen`` names among ``number``."""
    return list(range(number)) if chosen == "all" else chosen
