"""The known name nearest to a mistyped one."""

import difflib
from collections.abc import Sequence


def nearest_key(given: str, known: Sequence[str]) -> str:
    """The most similar of ``known``: by its last part first (a wrong section is the commonest mistake), then as a
    whole."""
    leaf = given.rsplit(".", 1)[-1]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    candidates = same_leaf or list(known)
    return max(candidates, key=lambda key: difflib.SequenceMatcher(None, given, key).ratio())
