"""The error of every configuration mistake, and how messages show long things."""

from collections.abc import Iterable

_SHOWN_CHARACTERS = 200


class ConfigError(ValueError):
    """A configuration cannot be run; the message says what must hold, what was given and what to do."""


def shortened(text: str) -> str:
    """``text`` for a message: its beginning, where it is long."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"


def listed(names: Iterable[str], most: int = 5) -> str:
    """``names`` in order for a message: at most so many, the rest counted."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest
