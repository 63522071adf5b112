"""``ConfigError``, and helpers for its messages: shortened values, lists of names, the nearest known key."""

import difflib
import math
from collections.abc import Collection, Iterable

_SHOWN_CHARACTERS = 200


class ConfigError(ValueError):
    """An invalid configuration; the message says what must hold, what was given and what to do."""


def shortened(text: str) -> str:
    """``text`` for a message; a long one is cut, with its length."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"


def listed(names: Iterable[str], most: int = 5) -> str:
    """``names`` sorted for a message: at most ``most`` of them, and the number of the others."""
    ordered = sorted(names)
    remainder = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + remainder


def install_extra(extra: str) -> str:
    """The command that installs a group of optional packages of pyproject.toml, for a message. No index has
    verl_rc."""
    return f"run `python -m pip install --editable '.[{extra}]'` in the clone of verl_rc"


_TYPO = 3
"""Largest number of inserted and deleted letters between a name and its misspelling; two swapped letters
count as two."""


def nearest_key(name: str, keys: Collection[str]) -> str:
    """The key that is most similar to ``name``, or several joined by "or" when they are equally
    similar.

    Tried in this order: the only key that ends with ``name`` (its first sections are missing); keys that
    differ by a spelling mistake; keys with the same last part, because a wrong section is the most frequent
    mistake; all other keys.
    """
    completed = [key for key in keys if key.endswith(f".{name}")]
    if len(completed) == 1:
        return completed[0]
    letters = {key: _different_letters(key, name) for key in keys if abs(len(key) - len(name)) <= _TYPO}
    fewest = min(letters.values(), default=math.inf)
    if fewest <= _TYPO:
        return " or ".join(key for key, number in letters.items() if number == fewest)
    *sections, leaf = name.split(".")
    same_leaf = [key for key in keys if key.rsplit(".", 1)[-1] == leaf]
    ordered = sorted(same_leaf or keys, key=lambda key: -difflib.SequenceMatcher(None, name, key).ratio())
    has_section = bool(set(sections) & set(ordered[0].split(".")[:-1]))
    return " or ".join(ordered[: 2 if same_leaf and not has_section else 1])


def _different_letters(key: str, name: str) -> int:
    """How many letters must be inserted and deleted to make one name of the other."""
    matcher = difflib.SequenceMatcher(None, key, name, autojunk=False)
    return round((1 - matcher.ratio()) * (len(key) + len(name)))
