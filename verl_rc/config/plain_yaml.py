"""YAML of somebody else, as plain values: without aliases, within bounds that are checked before it is
built."""

from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LARGEST = 1 << 20
"""Largest number of characters of a text."""
_MOST_LEVELS = 100
_LONGEST_NUMBER = 64
"""Largest number of characters of a number in base 60, which takes time by the square of its length."""
_NUMERALS = frozenset("+-.0123456789:_")


def load_yaml(text: str) -> Any:
    """The value of a YAML document: mappings, lists, text, numbers, dates and None.

    An alias stands for a value that is written elsewhere; 450 bytes of them unfold to gigabytes.

    Raises:
        ValueError: the text is too large, too deep, or has an alias.
        yaml.YAMLError: it is no YAML, or names a type.
    """
    if len(text) > LARGEST:
        raise ValueError(f"it must have at most {LARGEST:,} characters, got {len(text):,}")
    levels = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"it must be written without aliases, but it has *{event.anchor}; write the value there"
            )
        if isinstance(event, yaml.CollectionStartEvent | yaml.CollectionEndEvent):
            levels += 1 if isinstance(event, yaml.CollectionStartEvent) else -1
            if levels > _MOST_LEVELS:
                raise ValueError(f"it must have at most {_MOST_LEVELS} levels of mappings and lists")
        elif isinstance(event, yaml.ScalarEvent) and ":" in event.value:
            is_number = event.tag is not None or _NUMERALS.issuperset(event.value)
            if is_number and len(event.value) > _LONGEST_NUMBER:
                raise ValueError(f"a number must have at most {_LONGEST_NUMBER} characters")
    return yaml.load(text, Loader=_LOADER)
