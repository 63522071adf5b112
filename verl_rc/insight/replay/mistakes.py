"""Mistakes in the prompts of trainer or engine, and which of them gives the recorded log-probs."""

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
    """Mistakes, each in words with the prompts as they would be scored; ``longest``: tokens of a padded
    one."""
    yield "prompts without their first token", [list(prompt[1:] or prompt) for prompt in prompts]
    yield "the first token of prompts twice", [[*prompt[:1], *prompt] for prompt in prompts]
    yield (
        "padding attended as if it were prompt",
        [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts],
    )


@dataclass(frozen=True)
class Mistakes:
    """Mistakes in the inputs with which recorded log-probs come out again; empty where none does."""

    of_trainer: str = ""
    of_engine: str = ""
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
        """Compare what was recorded with what comes out without a mistake and with each; ``distance`` in
        nats."""

        def nearest(recorded: _Values) -> tuple[float, str]:
            return min((distance(recorded, scored), name) for name, scored in mistaken.items())

        of_trainer, of_engine, numbers = "", "", {}
        if train is not None:
            left, name = nearest(train)
            if distance(train, clean) > max(_SAME, 10 * left):
                of_trainer = name
        if rollout is not None:
            left, name = nearest(rollout)
            # The engine rounds: its log-probs never come out to the last digits.
            if distance(rollout, clean) > BOUNDS.far_above_floor * left:
                of_engine, numbers = name, {"engine_reproduced": left}
        return cls(of_trainer, of_engine, numbers)
