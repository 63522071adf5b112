"""Converting raw overrides to Hydra's grammar, and refusing unknown keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic import BaseModel

from verl_rc.config.errors import ConfigError, nearest_key, shortened
from verl_rc.config.load.compose import Composer
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import has_key, known_keys, leads_to_leaf
from verl_rc.config.verl.keys import is_verl_key, refused_for
from verl_rc.config.verl.migration import legacy_translation
from verl_rc.config.verl.refused import REFUSALS

CORRECTION = "algorithm.rollout_correction"
PRESET = f"{CORRECTION}.preset"
"""A key of the loader, not of the schema; the loader replaces it by other keys."""

_TEXT_KEYS = tuple(f"{CORRECTION}.{leaf}" for leaf in ("rollout_rs", "rollout_rs_threshold", "rollout_is_threshold"))
_SEARCH_PATH = "hydra.searchpath"


@dataclass(frozen=True)
class Prepared:
    """Overrides in Hydra's grammar."""

    of_files: list[str]
    """Choices of groups, and the search path."""
    keys: list[str]
    """All others: keys of the schema, and of verl."""


def prepare(schema: type[BaseModel], composer: Composer, overrides: Sequence[str]) -> Prepared:
    """Sort and rewrite raw overrides. Raises ``ConfigError`` naming the first invalid one."""
    translation = legacy_translation(overrides) if schema is RunConfig else None
    if translation is not None:
        raise ConfigError(translation)
    groups, keys, search_path = [], [], []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key == _SEARCH_PATH:
            search_path.append(override.lstrip("+"))
        elif key.startswith(("hydra.", "hydra/")):
            raise ConfigError(refused_for([override.lstrip("+")], REFUSALS["hydra"].reason))
        elif composer.is_group(override):
            groups.append(override)
        else:
            _check_override(schema, composer, key)
            keys.append(_prepare_key(override))
    return Prepared([*search_path, *composer.prepare_groups(groups)], keys)


def check_keys(schema: type[BaseModel], given: Mapping[str, Any], prefix: str = "") -> None:
    """Check the keys that came from YAML files."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if not _is_known(schema, key):
            raise ConfigError(_unknown(schema, key))
        if isinstance(value, Mapping) and not leads_to_leaf(schema, key):
            check_keys(schema, value, f"{key}.")


def unreadable(error: Exception, overrides: Sequence[str]) -> str:
    """The error message for arguments that Hydra cannot compose, with what to write instead."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    culprit = next((override.lstrip("+") for override in overrides if _parsing_fails(override)), None)
    if culprit is not None:
        return (
            f"the overrides cannot be read: {shortened(culprit)!r} must be key=value in Hydra's grammar, in which a value with "
            f"special characters stands in quotes of its own, in a shell 'key=\"value\"'. Hydra says: {shortened(reason)}."
        )
    if "Could not delete" in reason:
        return (
            f"the overrides cannot be read: {reason.rstrip('.')}. ~key takes back what a run file or a group gave, and none gave "
            "this; drop it."
        )
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is not None:
        return f"{mark.name}, line {mark.line + 1}, must be YAML: {error}".split("\n", maxsplit=1)[0] + "."
    key = re.search(r"full_key: (\S+)", str(error))
    return f"the configuration cannot be composed: {shortened(reason.rstrip('.'))}{f' (at {key[1]})' if key else ''}."


def _prepare_key(override: str) -> str:
    if override.startswith("~"):
        return override
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key in _TEXT_KEYS and value and value[0] not in "'\"[{" and value not in ("null", "None"):
        if not value.startswith("choice("):
            value = "'" + value.replace("\\", "").replace("'", "\\'") + "'"
    elif value[:2] in ("'[", '"[') and value[-2:] == f"]{value[0]}":  # a list that a shell handed over with its quotes
        value = value[1:-1]
    if value.startswith("~"):
        value = f"'{value}'"
    return f"++{key}={value}"


def _check_override(schema: type[BaseModel], composer: Composer, key: str) -> None:
    if _is_known(schema, key):
        return
    groups = composer.groups() if key and "." not in key else []
    nearest = nearest_key(key, [*groups, *schema.model_fields])
    if nearest in groups:
        raise ConfigError(
            f"{shortened(key)} is not a known key or config group; the nearest is the group {nearest} of {', '.join(groups)}."
        )
    raise ConfigError(_unknown(schema, key))


def _is_known(schema: type[BaseModel], key: str) -> bool:
    return has_key(schema, key) or (schema is RunConfig and (is_verl_key(key) or key.startswith(PRESET)))


def _unknown(schema: type[BaseModel], key: str) -> str:
    known = [*known_keys(schema), *([PRESET] if schema is RunConfig else [])]
    return f"{shortened(key)} is not a known key; the nearest is {nearest_key(key, known)}. All keys: docs/configuration.md."


def _parsing_fails(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        return True
    return False
