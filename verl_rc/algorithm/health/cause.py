"""A row of the table of causes: what a cause of the gap is."""

from dataclasses import dataclass
from typing import Literal

from verl_rc.algorithm.health.statement import Level

Evidence = Literal["tokens", "engines", "run", "replays"]
"""Evidence that names a cause: the tokens of single steps, the engines compared, the course of a run, or
replays."""
NO_CORRECTION = "No correction repairs this."
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Cause:
    """One row of the table."""

    row: int
    """The cause's number in docs/see_why.md, which readers use and no rule does."""
    name: str
    condition: str
    """The condition under which it is named, in words."""
    sentence: str
    """A template; evidence, and words where a number is not enough, fill it. Empty: the rule has several."""
    next_test: str
    """The next test, or what to do."""
    overrides: tuple[str, ...] = ()
    evidence: Evidence = "tokens"
    level: Level = "fault"
    is_specific: bool = True
    """False: something differs, or nothing does, and the metrics do not tell what."""
