"""What a reward function says about one response, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class RewardOutput:
    """The score of one response and whatever else the reward function reports about it."""

    score: float
    """The reward, finite; it is placed on the response's last token."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, e.g. ``acc`` (1.0 right, 0.0 wrong) and ``pred`` (the answer that was read)."""


def as_reward_output(returned: object, sample: str) -> RewardOutput:
    """Check what a reward function returned: a number, or a mapping with the number under ``score``.

    A bare number also becomes ``acc``. ``sample`` names the response in the error. Raises ``ValueError`` when the score
    is missing, no number, or not finite.
    """
    if isinstance(returned, Mapping):
        unnamed = [key for key in returned if not isinstance(key, str)]
        if "score" not in returned or unnamed:
            raise ValueError(
                "a reward function must return a number, or a dict that has 'score' among keys that are strings; for "
                f"{sample} it returned a dict with the keys {list(returned)}."
            )
        extras = {key: value for key, value in returned.items() if key != "score"}
        if extras.get("acc") is not None:
            extras["acc"] = _number(extras["acc"], "acc", sample)
        return RewardOutput(_number(returned["score"], "score", sample), extras)
    score = _number(returned, "score", sample)
    return RewardOutput(score, {"acc": score})


def _number(value: object, name: str, sample: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(
            f"the {name} of a reward function must be a finite number, got {value!r} ({type(value).__name__}) "
            f"for {sample}. Return a float, or a dict with one under 'score'."
        )
    return float(value)
