"""Thresholds of rollout correction: numbers, ``lower_upper`` text, mappings and pairs, all read into one record."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")


@dataclass(frozen=True)
class Threshold:
    """An upper bound, with a lower one when it is a band. Both inclusive."""

    upper: float
    lower: float | None = None

    @property
    def reciprocal_lower(self) -> float:
        """The lower bound of a ratio: the given one, else ``1 / upper``."""
        return 1.0 / self.upper if self.lower is None else self.lower


def parse_threshold(value: object, key: str) -> Threshold:
    """Read one threshold: ``2.0``, ``"2.0"``, ``"0.5_5.0"``, ``{lower: 0.5, upper: 5.0}`` or ``[0.5, 5.0]``.

    Raises ``ValueError`` naming ``key`` unless the bounds are finite, positive and in order.
    """
    if isinstance(value, Mapping):
        unknown = set(value) - {"lower", "upper"}
        if unknown or "upper" not in value:
            raise ValueError(f"{key} as a mapping must have upper (and perhaps lower), got {dict(value)}")
        bounds = [value[name] for name in ("lower", "upper") if value.get(name) is not None]
    elif isinstance(value, str):
        bounds = list(value.strip().split("_"))
    elif isinstance(value, Sequence):
        bounds = list(value)
    else:
        bounds = [value]
    if not 1 <= len(bounds) <= 2:
        raise ValueError(f"{key} must be one bound or a lower and an upper one, got {value!r}")
    numbers = [_number(bound, value, key) for bound in bounds]
    if any(not math.isfinite(number) or number <= 0 for number in numbers):
        raise ValueError(f"{key} must be finite and > 0, got {value!r}")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise ValueError(f"{key} must have lower <= upper, got {value!r}")
    return Threshold(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def _number(bound: object, value: object, key: str) -> float:
    if isinstance(bound, str) and _NUMBER.match(bound.strip()):
        return float(bound)
    if isinstance(bound, (int, float)) and not isinstance(bound, bool):
        return float(bound)
    raise ValueError(f"{key} must be a number such as 2.0, a band such as 0.5_5.0, or a mapping with lower and upper; got {value!r}")
