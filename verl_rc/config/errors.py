"""The error of every configuration mistake, and how its message shows long values and the key that was meant."""

import difflib
from collections.abc import Iterable, Sequence

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


_TYPO = 3
"""Letters that two names may have apart from each other and still be one name with a slip: two swapped letters count two."""


def nearest_key(given: str, known: Sequence[str]) -> str:
    """The most similar of ``known``, or several that are as similar: the one that ends like ``given`` where only its first
    sections are missing; one that differs by a slip; else, because a wrong section is the commonest mistake, keys with the same
    last part, the two most similar when none of their sections was named."""
    whole = [key for key in known if key.endswith(f".{given}")]
    if len(whole) == 1:
        return whole[0]
    close = _close_names(given, known)
    if close:
        return " or ".join(key for key, letters in close.items() if letters == min(close.values()))
    *sections, leaf = given.split(".")
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    ordered = sorted(same_leaf or known, key=lambda key: -difflib.SequenceMatcher(None, given, key).ratio())
    named = bool(set(sections) & set(ordered[0].split(".")[:-1]))
    return " or ".join(ordered[: 2 if same_leaf and not named else 1])


def _close_names(given: str, known: Sequence[str]) -> dict[str, int]:
    """The names that few letters make of ``given``, and how many must be taken out or put in."""
    matcher = difflib.SequenceMatcher(None, "", given, autojunk=False)
    found = {}
    for key in known:
        matcher.set_seq1(key)
        letters = len(key) + len(given)
        most_alike = 1 - _TYPO / letters
        if matcher.real_quick_ratio() >= most_alike and matcher.quick_ratio() >= most_alike and matcher.ratio() >= most_alike:
            found[key] = round((1 - matcher.ratio()) * letters)
    return found
