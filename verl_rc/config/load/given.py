"""What files, groups and raw overrides say, as a plain tree of the schema's keys, and their mistakes as
sentences."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from verl_rc.config.errors import ConfigError, nearest_key, shortened
from verl_rc.config.load.compose import Composer
from verl_rc.config.processes import require_utf8
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig, preset_fields
from verl_rc.config.run import FOLLOWED_KEYS, RunConfig
from verl_rc.config.schema import (
    default_at,
    fields_of,
    has_key,
    is_section,
    leaves_of,
    may_be_null,
    required_leaves,
    value_at,
)
from verl_rc.config.verl.keys import TranslatedTree, is_verl_key, refused_for, translate_tree
from verl_rc.config.verl.migration import legacy_translation
from verl_rc.config.verl.refused import REFUSALS

CORRECTION = "algorithm.rollout_correction"
PRESET = f"{CORRECTION}.preset"
"""A key of the loader, not of the schema; the loader replaces it by other keys."""

_TEXT_KEYS = tuple(
    f"{CORRECTION}.{leaf}" for leaf in ("rollout_rs", "rollout_rs_threshold", "rollout_is_threshold")
)
_SEARCH_PATH = "hydra.searchpath"


@dataclass(frozen=True)
class Prepared:
    """Overrides in Hydra's grammar."""

    group_choices: list[str]
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


def check_keys(schema: type[BaseModel], tree: Mapping[str, Any], prefix: str = "") -> None:
    """Check the keys that came from YAML files."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if not _is_known(schema, key):
            raise ConfigError(_unknown(schema, key))
        if isinstance(value, Mapping) and is_section(schema, key):
            check_keys(schema, value, f"{key}.")


def unreadable(error: Exception, overrides: Sequence[str]) -> str:
    """The error message for arguments that Hydra cannot compose, with what to write instead."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    culprit = next((override.lstrip("+") for override in overrides if _parsing_fails(override)), None)
    if culprit is not None:
        return (
            f"the overrides cannot be read: {shortened(culprit)!r} must be key=value in Hydra's grammar, in "
            "which a value with special characters stands in quotes of its own, in a shell 'key=\"value\"'. "
            f"Hydra says: {shortened(reason)}."
        )
    if "Could not delete" in reason:
        return (
            f"the overrides cannot be read: {reason.rstrip('.')}. ~key takes back what a run file or a group "
            "gave, and none gave this; drop it."
        )
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is not None:
        return f"{mark.name}, line {mark.line + 1}, must be YAML: {error}".split("\n", maxsplit=1)[0] + "."
    key = re.search(r"full_key: (\S+)", str(error))
    return (
        "the configuration cannot be composed: "
        f"{shortened(reason.rstrip('.'))}{f' (at {key[1]})' if key else ''}."
    )


def _prepare_key(override: str) -> str:
    if override.startswith("~"):
        return override
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key in _TEXT_KEYS and value and value[0] not in "'\"[{" and value not in ("null", "None"):
        if not value.startswith("choice("):
            value = "'" + value.replace("\\", "").replace("'", "\\'") + "'"
    elif (
        value[:2] in ("'[", '"[') and value[-2:] == f"]{value[0]}"
    ):  # a list that a shell handed over with its quotes
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
            f"{shortened(key)} is not a known key or config group; the nearest is the group {nearest} of "
            f"{', '.join(groups)}."
        )
    raise ConfigError(_unknown(schema, key))


def _is_known(schema: type[BaseModel], key: str) -> bool:
    return has_key(schema, key) or (schema is RunConfig and (is_verl_key(key) or key.startswith(PRESET)))


def _unknown(schema: type[BaseModel], key: str) -> str:
    keys = [*fields_of(schema), *([PRESET] if schema is RunConfig else [])]
    return (
        f"{shortened(key)} is not a known key; the nearest is {nearest_key(key, keys)}. All keys: "
        "docs/configuration.md."
    )


def _parsing_fails(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        return True
    return False


_INTEGER_BITS = 63


def refuse_huge_numbers(tree: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for integers of more than 64 bits, which libraries that read them cannot hold."""
    for key, value in leaves_of(tree):
        if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            raise ConfigError(
                f"{key} must be a number of at most {_INTEGER_BITS} bits, got {value.bit_length()}; lower it."
            )


def error_sentences(schema: type[BaseModel], error: ValidationError, tree: Mapping[str, Any]) -> str:
    """One line for each validation error, without errors that only follow from another one."""
    causes = [item for item in error.errors() if not _follows_another(item, tree)]
    return "\n".join(_explain(schema, item) for item in causes or error.errors())


def _explain(schema: type[BaseModel], item: Any) -> str:
    key, value, message = _key_of_mistake(item), item["input"], str(item["msg"])
    if item["type"] == "missing":
        leaves = required_leaves(schema, key)
        return (
            f"{' and '.join(leaves)} must be given: write {' '.join(f'{leaf}=<value>' for leaf in leaves)}."
        )
    if item["type"] == "int_parsing_size":
        message = f"Input should be a whole number of at most {_INTEGER_BITS} bits"
    if message.startswith("Value error, ") or not message.startswith("Input should be "):
        message = message.removeprefix("Value error, ")
        received = (
            "" if isinstance(value, Mapping) or "got " in message else f"; got {shortened(repr(value))}"
        )
        return f"{key + ': ' if key and key not in message else ''}{message}{received}."
    if item["type"] == "model_type":
        return (
            f"{key} must be a section; got {shortened(repr(value))}: write its keys one by one, "
            f"{key}.<name>=<value>."
        )
    must_be = re.sub(r", (unable|got) .*", "", message.removeprefix("Input should be "))
    return f"{key} must be {must_be}; got {shortened(repr(value))}: {_instead(schema, key, value, must_be)}."


def _instead(schema: type[BaseModel], key: str, value: Any, must_be: str) -> str:
    """The remedy for a value of a wrong type."""
    default, field = default_at(schema, key), fields_of(schema).get(key)
    if field is not None and may_be_null(field) and isinstance(value, str) and value.lower() == "none":
        return f"write {key}=null for none"
    if must_be == "a valid string" and isinstance(value, (bool, int, float)):
        return f"""put text that reads as a number or a boolean in quotes, in a shell '{key}="{value}"'"""
    return f"write {key}=<{must_be}>" if default is None else f"write that, or drop it for {default!r}"


def _follows_another(item: Any, tree: Mapping[str, Any]) -> bool:
    """Whether an error is about a key that was not given and got its invalid value from another key."""
    return _key_of_mistake(item) in FOLLOWED_KEYS and value_at(tree, _key_of_mistake(item)) is None


def _key_of_mistake(item: Any) -> str:
    return ".".join(str(part) for part in item["loc"])


MISSING = "???"
"""Hydra's mark of a required value that was not given."""

_SET_BY_PRESETS = {leaf for preset in PRESETS.values() for leaf in preset.fields}


def given_tree(schema: type[BaseModel], options: Namespace) -> TranslatedTree:
    """Compose a command line, resolve its interpolations against the defaults, and fill in the preset that it
    names.

    Raises ``ConfigError``.
    """
    require_utf8()
    with composing(options.overrides):
        composer = Composer(options, has_groups=schema is RunConfig)
        prepared = prepare(schema, composer, options.overrides)
        tree = plain_tree(schema, composer.compose(prepared.group_choices, prepared.keys), resolve=True)
        if any(
            override.lstrip("+").partition("=")[0] in ("correction", PRESET) for override in options.overrides
        ):
            _refuse_preset_under_a_file(
                tree, plain_tree(schema, composer.compose(prepared.group_choices, []), resolve=False)
            )
    return translated_tree(schema, tree)


def combinations(schema: type[BaseModel], options: Namespace) -> list[list[str]]:
    """The overrides of every run of a sweep. Raises ``ConfigError``."""
    with composing(options.overrides):
        composer = Composer(options, has_groups=schema is RunConfig)
        prepared = prepare(schema, composer, options.overrides)
        return composer.sweep([*prepared.group_choices, *prepared.keys])


@contextlib.contextmanager
def composing(overrides: Sequence[str]) -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and the YAML reader into ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        OSError,
        RecursionError,
        ValueError,
    ) as error:
        raise ConfigError(unreadable(error, overrides)) from error


def translated_tree(schema: type[BaseModel], tree: dict[str, Any]) -> TranslatedTree:
    """A composed tree with verl's keys translated and the preset applied; raises ``ConfigError`` for unknown
    keys."""
    translation = translate_tree(tree) if schema is RunConfig else TranslatedTree(tree, [])
    check_keys(schema, translation.tree)
    refuse_huge_numbers(translation.tree)
    _apply_preset(translation.tree)
    return translation


def plain_tree(schema: type[BaseModel], composed: DictConfig, resolve: bool) -> dict[str, Any]:
    """The composed tree without missing required values; interpolations may refer to keys that were not
    given."""
    tree = OmegaConf.to_container(composed)
    assert isinstance(tree, dict)
    resolved: Any = tree
    if resolve and "${" in str(tree):
        resolved = OmegaConf.to_container(OmegaConf.merge(every_key(schema), composed), resolve=True)
    return _only_given(tree, resolved)


def every_key(schema: type[BaseModel]) -> DictConfig:
    """Every key with its default; required keys have Hydra's mark ``???``."""
    tree = OmegaConf.create({})
    for key, field in fields_of(schema).items():
        OmegaConf.update(tree, key, MISSING if field.is_required() else field.default, force_add=True)
    return tree


def _only_given(tree: Mapping[Any, Any], resolved: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(key): _only_given(value, resolved[key])
        if isinstance(value, Mapping) and isinstance(resolved[key], Mapping)
        else resolved[key]
        for key, value in tree.items()
        if value != MISSING
    }


def _refuse_preset_under_a_file(tree: Mapping[str, Any], file_tree: Mapping[str, Any]) -> None:
    """Refuse a preset on the command line when a file, such as a run's ``resolved_config.yaml``, would
    override parts of it."""
    leaves = {leaf: value for leaf, value in _correction_of(file_tree).items() if leaf in _SET_BY_PRESETS}
    name = str(_correction_of(tree).get("preset"))
    if not leaves or name not in PRESETS:
        return
    preset = RolloutCorrectionConfig.from_preset(name)
    try:
        result = RolloutCorrectionConfig.from_preset(name, **leaves)
    except ValueError:  # a value that is wrong in itself is reported with all others
        return
    changes = [leaf for leaf in leaves if getattr(result, leaf) != getattr(preset, leaf)]
    if changes:
        raise ConfigError(
            f"{CORRECTION}.preset={name} must not be undone by a file, and the configuration file gives "
            f"{', '.join(f'{leaf}: {leaves[leaf]}' for leaf in changes)}. Remove {' and '.join(changes)} "
            f"from {CORRECTION} in the file, or set them on the command line instead of the preset."
        )


def _correction_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    section = value_at(tree, CORRECTION)
    return section if isinstance(section, dict) else {}


def _apply_preset(tree: dict[str, Any]) -> None:
    """Fill the leaves of the correction section that were not given from the preset named there."""
    section = _correction_of(tree)
    name = section.pop("preset", None)
    if name is None:
        return
    try:
        fields = preset_fields(str(name), section)
    except ValueError as error:
        raise ConfigError(f"{CORRECTION}.preset: {error}") from error
    # ``rollout_is`` is set even to its default, so that preset=disabled differs from no choice.
    section.update({"rollout_is": None, **fields})
