"""Values of a user's code as plain Python: what a checkpoint may hold, and another process can read."""

import math
from collections.abc import Mapping
from numbers import Real


def plain(value: object) -> object:
    """A copy of ``value`` in Python's built-in types: numbers, valid UTF-8, None, lists and dicts.

    Arrays and tensors without dimensions count as numbers. Raises ``TypeError``, whose text is the type, for
    what is none of them, and for an integer beyond every float.
    """
    value = unwrapped(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int) and is_finite(value):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, int):
        return float(value)
    if isinstance(value, Mapping):
        return {plain_text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise TypeError(type(value).__name__)


def unwrapped(value: object) -> object:
    """The one number of an array or tensor without dimensions; anything else as it is."""
    return value.tolist() if getattr(value, "shape", None) == () and hasattr(value, "tolist") else value


def is_finite(number: Real | int) -> bool:
    """Whether it is a finite number as a float, too."""
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond every float
        return False


def plain_text(value: str) -> str:
    """``value`` as valid UTF-8; lone surrogates are escaped."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
