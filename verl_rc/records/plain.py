"""Values of a user's code as plain Python: what a checkpoint may hold, and another process can read."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

_LARGEST = float.fromhex("0x1.fffffep127")
"""The largest number in float32."""


def plain(value: object) -> object:
    """A copy of ``value`` in Python's built-in types: numbers, valid UTF-8, None, lists and dicts.

    Arrays and tensors without dimensions count as numbers. Raises ``TypeError``, whose text is the type, for
    what is none of them, and for an integer beyond every float32.
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


def is_finite(number: Any) -> bool:
    """Whether a real number is finite in float32, too, as which scores are stored."""
    return bool(abs(number) <= _LARGEST)  # not NaN, either


def plain_text(value: str) -> str:
    """``value`` as valid UTF-8; lone surrogates are escaped."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
