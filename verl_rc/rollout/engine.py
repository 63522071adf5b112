"""What goes to an engine and comes back: requests, samples that have ended, and what an update cut."""

from dataclasses import dataclass, field

from verl_rc.data.parts import Sample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions


@dataclass(frozen=True)
class QueuedSample:
    """One response to sample, in the queue of an engine."""

    number: int
    """Waiting samples begin in ascending order of this number."""
    request: GenerationRequest
    options: SamplingOptions
    ahead: bool = False
    """Priority: the sample begins before those without, and no other one begins until it has ended. Running
    samples continue."""


@dataclass(frozen=True)
class Collected:
    """Samples of one engine that have ended; every one is collected once."""

    samples: list[Sample]
    """Those that have a response, in any order."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why the others have none, by number: a tool failed."""


@dataclass(frozen=True)
class Interrupted:
    """What a weight update interrupted, of one engine."""

    samples: list[Sample]
    """Those that had begun and not ended, with their tokens before the update, in any order."""
    pause_seconds: float = 0.0
    """Seconds from the last step before the update until steps could be made again."""
    recomputed_tokens: int = 0
    """Tokens of prompts and responses that the engine has to compute again."""
