"""Thresholds of rollout correction: numbers, ``lower_upper`` text, mappings and pairs, all read into one record."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_rc.config.errors import shortened

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SHAPES = "a number such as 2.0, a band such as 0.5_5.0, or a mapping such as {lower: 0.5, upper: 5.0}"


@dataclass(frozen=True)
class Threshold:
    """An upper bound, with a lower one when it is a band. Both inclusive."""

    upper: float
    """Largest value within bounds."""
    lower: float | None = None
    """Smallest value within bounds; None: only an upper bound was given."""

    @property
    def reciprocal_lower(self) -> float:
        """The lower bound of a ratio: the given one, else ``1 / upper``."""
        return 1.0 / self.upper if self.lower is None else self.lower

    @property
    def keeps_one(self) -> bool:
        """Whether a ratio of 1 is within bounds."""
        return self.upper >= 1.0 and (self.lower is None or self.lower <= 1.0)

    def __str__(self) -> str:
        return repr(self.upper) if self.lower is None else f"{self.lower!r}_{self.upper!r}"


def parse_threshold(value: object, key: str) -> Threshold:
    """Read one threshold: ``2.0``, ``"2.0"``, ``"0.5_5.0"``, ``{lower: 0.5, upper: 5.0}`` or ``[0.5, 5.0]``.

    Raises ``ValueError`` naming ``key`` unless the bounds are finite, positive and in order.
    """
    numbers = [_number(bound, value, key) for bound in _bounds(value, key)]
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"{key} must be {_SHAPES}; got {shortened(repr(value))}")
    if any(not math.isfinite(number) or number <= 0 for number in numbers):
        raise ValueError(f"{key} must be finite and > 0; got {shortened(repr(value))}")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise ValueError(
            f"{key} must have lower <= upper; got {shortened(repr(value))}, did you mean {numbers[1]!r}_{numbers[0]!r}?"
        )
    return Threshold(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def threshold_specs(value: object) -> list[object]:
    """The thresholds in ``value``: the parts of comma-separated text or of a list, else the value itself."""
    if isinstance(value, str):
        return list(value.split(","))
    if isinstance(value, Sequence):
        return list(value)
    return [value]


def _bounds(value: object, key: str) -> list[object]:
    if isinstance(value, Mapping):
        unknown = sorted(set(map(str, value)) - {"lower", "upper"})
        if unknown or value.get("upper") is None:
            raise ValueError(f"{key} as a mapping must have upper, and perhaps lower; got {dict(value)}")
        return [value[name] for name in ("lower", "upper") if value.get(name) is not None]
    if isinstance(value, str):
        return list(value.strip().split("_"))
    return list(value) if isinstance(value, Sequence) else [value]


def _number(bound: object, value: object, key: str) -> float:
    if isinstance(bound, str) and _NUMBER.fullmatch(bound.strip()):
        return float(bound)
    if isinstance(bound, (int, float)) and not isinstance(bound, bool):
        return float(bound)
    raise ValueError(f"{key} must be {_SHAPES}; got {shortened(repr(value))}")
