"""What a study is: its question, its arms and its seeds, fixed before anything is run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ACCURACY = "val-core/digits/acc/mean@1"
"""What arms are compared by: greedy accuracy on the validation prompts."""
PROMPTS = 256
"""Validation prompts of every task."""
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Task:
    """What the runs of a study start from: problems, and a model after a warm start."""

    folder: str
    """Below the folder of all studies; empty: that folder."""
    settings: Mapping[str, str]
    """Environment of ``scripts/warm_start.sh`` beside its defaults."""


QUICKSTART = Task("", {})


@dataclass(frozen=True)
class Study:
    """Arms that differ in one thing at a time, each run with every seed. All runs start from one model."""

    common: tuple[str, ...]
    """Overrides of every run."""
    arms: Mapping[str, tuple[str, ...]]
    """Overrides of an arm, by its name."""
    seeds: tuple[int, ...]
    minutes: float
    """Of one run: on one core, or on two where a run is asynchronous. Announced before the first run."""
    task: Task = QUICKSTART
    every: int = 1
    """Of how many steps one is kept, for long runs; validations are among them."""
    planted: Mapping[str, str] = field(default_factory=dict)
    """What the workers do wrong, by arm; see ``scripts/planted_faults/workers.py``."""
    code: Mapping[str, str] = field(default_factory=dict)
    """By arm, a hash of the user's own file that it runs, if any."""
