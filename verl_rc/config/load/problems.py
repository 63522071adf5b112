"""What the schema finds wrong, in sentences: the key, what must hold, what was given, and what to write."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from verl_rc.config.errors import ConfigError, shortened
from verl_rc.config.run import FALLBACKS
from verl_rc.config.schema import default_at, needed_below

_INTEGER_BITS = 63


def refuse_huge(given: Mapping[str, Any], prefix: str = "") -> None:
    """Nothing that is counted here needs more than 64 bits, and what reads it may take no more."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            refuse_huge(value, f"{prefix}{name}.")
        elif isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            raise ConfigError(
                f"{prefix}{name} must be a number of at most {_INTEGER_BITS} bits, got {value.bit_length()}; lower it."
            )


def in_sentences(schema: type[BaseModel], error: ValidationError, given: Mapping[str, Any]) -> str:
    """One line for each finding; what only follows from another finding is left out."""
    own = [item for item in error.errors() if not _follows_another(item, given)]
    return "\n".join(_explain(schema, item) for item in own or error.errors())


def _explain(schema: type[BaseModel], item: Any) -> str:
    path = [str(part) for part in item["loc"]]
    key, given, message = ".".join(path), item["input"], str(item["msg"])
    if item["type"] == "missing":
        needed = needed_below(schema, path)
        return f"{' and '.join(needed)} must be given: write {' '.join(f'{leaf}=<value>' for leaf in needed)}."
    if item["type"] == "int_parsing_size":
        message = f"Input should be a whole number of at most {_INTEGER_BITS} bits"
    if message.startswith("Value error, ") or not message.startswith("Input should be "):
        message = message.removeprefix("Value error, ")
        shown = "" if isinstance(given, Mapping) or "got " in message else f"; got {shortened(repr(given))}"
        return f"{key + ': ' if key and key not in message else ''}{message}{shown}."
    if item["type"] == "model_type":
        return f"{key} must be a section; got {shortened(repr(given))}: write its keys one by one, {key}.<name>=<value>."
    must_be = re.sub(r", (unable|got) .*", "", message.removeprefix("Input should be "))
    default = default_at(schema, path)
    instead = f"write {key}=<{must_be}>" if default is None else f"write that, or drop it for {default!r}"
    return f"{key} must be {must_be}; got {shortened(repr(given))}: {instead}."


def _follows_another(item: Any, given: Mapping[str, Any]) -> bool:
    """Whether a finding is about a key that was not given, which has its wrong value from the key that it follows."""
    key = ".".join(str(part) for part in item["loc"])
    value: Any = given
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value is None and key in dict(FALLBACKS)
