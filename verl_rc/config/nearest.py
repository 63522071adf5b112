"""The known name nearest to a mistyped one."""

import difflib
from collections.abc import Sequence


def nearest_key(given: str, known: Sequence[str]) -> str:
    """The most similar of ``known``; the one that ends like ``given`` where only its first sections are missing. A wrong section
    is the commonest mistake: keys with the same last part come first, and when none of their sections was named the two most
    similar are given."""
    whole = [key for key in known if key.endswith(f".{given}")]
    if len(whole) == 1:
        return whole[0]
    *sections, leaf = given.split(".")
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    ordered = sorted(same_leaf or known, key=lambda key: -difflib.SequenceMatcher(None, given, key).ratio())
    named = bool(set(sections) & set(ordered[0].split(".")[:-1]))
    return " or ".join(ordered[: 2 if same_leaf and not named else 1])
