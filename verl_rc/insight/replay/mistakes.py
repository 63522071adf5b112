"""Mistakes in the prompts of trainer or engine, and the one that reproduces the recorded log-probs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from verl_rc.metrics.bounds import BOUNDS

_SAME = 1e-4
"""Nats; below it log-probs count as reproduced by a mistake in the inputs."""
_Values = TypeVar("_Values")
"""Log-probs of the tokens, in whatever holds them."""


def wrong_prompts(
    prompts: Sequence[Sequence[int]], longest: int, pad_token_id: int
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each mistake in words, and the prompts with it; ``longest``: tokens of a padded prompt."""
    yield "prompts without their first token", [list(prompt[1:] or prompt) for prompt in prompts]
    yield "the first token of prompts twice", [[*prompt[:1], *prompt] for prompt in prompts]
    yield (
        "padding attended as if it were prompt",
        [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts],
    )


@dataclass(frozen=True)
class Mistakes:
    """Mistakes in the inputs that reproduce recorded log-probs; empty where none does."""

    trainer: str = ""
    """Mistake that reproduces the trainer's log-probs."""
    engine: str = ""
    """Mistake that reproduces the engine's log-probs."""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_scores(
        cls,
        distance: Callable[[_Values, _Values], float],
        clean: _Values,
        mistaken: Mapping[str, _Values],
        train: _Values | None,
        rollout: _Values | None,
    ) -> "Mistakes":
        """Compare recorded log-probs with those that are computed without a mistake, and with each mistake.

        Args:
            distance: of two sets of log-probs, nats.
            clean: computed without a mistake.
            mistaken: computed with a mistake, by the mistake in words.
            train: recorded by the trainer; None: not recorded.
            rollout: recorded by the engine; None: not comparable.
        """

        def nearest(recorded: _Values) -> tuple[float, str]:
            return min((distance(recorded, scores), name) for name, scores in mistaken.items())

        trainer, engine, numbers = "", "", {}
        if train is not None:
            residual, name = nearest(train)
            if distance(train, clean) > max(_SAME, 10 * residual):
                trainer = name
        if rollout is not None:
            residual, name = nearest(rollout)
            # The engine rounds: its log-probs never come out to the last digits.
            if distance(rollout, clean) > BOUNDS.far_above_floor * residual:
                engine, numbers = name, {"engine_reproduced": residual}
        return cls(trainer, engine, numbers)
