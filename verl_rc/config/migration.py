"""Overrides and run files of verl, of any release since August 2025, as overrides of this project."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_rc.config.async_keys import with_verls_async_defaults
from verl_rc.config.errors import shortened
from verl_rc.config.recipe_script import arguments_of_script, is_recipe_script
from verl_rc.config.refused import RENAMED
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.rollout_correction_legacy import VERLS_FIELDS, import_legacy, is_legacy_key
from verl_rc.config.verl_keys import moved, settle_leaf

_SECTION = "algorithm.rollout_correction"
_OWN_LEAVES = set(RolloutCorrectionConfig.model_fields) - set(VERLS_FIELDS)
"""Fields that no release of verl has: there is nothing to translate."""


@dataclass(frozen=True)
class Migration:
    """What to write instead, and why."""

    overrides: list[str]
    """``key=value`` of this project; values as a shell hands them to Hydra."""
    notes: list[str]
    """One sentence for everything that changed, was dropped or is refused."""

    def command_line(self) -> str:
        """The overrides, ready to paste into a shell."""
        return " ".join(shlex.quote(override) for override in self.overrides)

    def recipe(self) -> str:
        """A shell script that starts the run; further arguments win."""
        lines = ["exec python -m verl_rc.main_ppo", *map(_quoted, self.overrides), '"$@"']
        start = " \\\n    ".join(lines)
        return f"#!/usr/bin/env bash\nset -euo pipefail\n\n{start}\n"


def migrate(arguments: Sequence[str], options: Mapping[str, str] | None = None) -> Migration:
    """Translate ``key=value`` overrides, YAML run files and shell scripts, given in any order; later ones win.

    ``options`` are ``era`` and ``k1_bound_convention`` of ``import_legacy``, for keys that do not tell. Raises ``ValueError`` for
    what is neither an override nor a file, and for correction settings that no release accepted.
    """
    given = with_verls_async_defaults(dict(pair for argument in _with_scripts_read(arguments) for pair in _read(argument)))
    correction = {key: value for key, value in given.items() if is_correction_key(key)}
    overrides, notes = [], []
    for key, value in given.items():
        if key in correction:
            continue
        here = moved(key, RENAMED)
        settled = settle_leaf(here, value, given)
        if settled.problem is not None:
            notes.append(f"{key} is left out: {settled.problem}.")
        elif settled.accepted:
            notes.append(f"{key}={value} is left out: it says what happens anyway.")
        else:
            if settled.key != key:
                notes.append(f"{key} is {settled.key} here.")
            overrides.append(f"{settled.key}={_plain(settled.value)}")
    if correction:
        preset = correction.pop(f"{_SECTION}.preset", None)
        if preset is not None:
            overrides.append(f"{_SECTION}.preset={preset}")
    if correction:
        fields, found = import_legacy({**correction, **(options or {})})
        overrides += [f"{_SECTION}.{name}={_plain(value)}" for name, value in fields.items()]
        notes += found
    return Migration(overrides, notes)


def legacy_translation(overrides: Sequence[str]) -> str | None:
    """A message with the translation when ``overrides`` hold correction keys of an earlier release; None when they hold none."""
    pairs = [(key.lstrip("+"), value) for key, _, value in (override.partition("=") for override in overrides)]
    legacy = [f"{key}={value}" for key, value in pairs if is_legacy_key(key)]
    if not legacy:
        return None
    named = ", ".join(shortened(pair) for pair in legacy)
    try:
        migration = migrate([f"{key}={value}" for key, value in pairs if is_correction_key(key)])
    except ValueError as error:
        return f"{named} cannot be translated from an earlier verl release: {error}."
    notes = " ".join(migration.notes)
    if not migration.overrides:
        return f"{named}: keys of an earlier verl release. Drop them, nothing stands for them here ({notes})."
    return f"{named}: keys of an earlier verl release. Write instead:\n  {migration.command_line()}\n({notes})"


def is_correction_key(key: str) -> bool:
    """Whether a key says how rollout and trainer are corrected, in any release."""
    return is_legacy_key(key) or (key.startswith(f"{_SECTION}.") and key.removeprefix(f"{_SECTION}.") not in _OWN_LEAVES)


def _with_scripts_read(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, those of a shell script in its place. Its Hydra options are left out: they name verl's own defaults."""
    for argument in arguments:
        if is_recipe_script(argument):
            yield from (found for found in arguments_of_script(argument) if "=" in found and not found.startswith("--"))
        else:
            yield argument


def _read(argument: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of an override or of a file."""
    key, is_override, value = argument.partition("=")
    if is_override:
        yield key.lstrip("+"), _value(key, value)
        return
    try:
        tree = yaml.safe_load(Path(argument).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise ValueError(
            f"an argument must be key=value, a YAML file or a shell script, got {shortened(argument)!r}: {reason}"
        ) from error
    if not isinstance(tree, dict):
        raise ValueError(f"{argument} must hold a mapping of keys, got {type(tree).__name__}")
    yield from _flatten(tree, "")


def _value(key: str, text: str) -> Any:
    """An override's value; thresholds stay text, because 0.5_5 is no number."""
    if key.endswith(("threshold", "rollout_rs")):
        return text.strip("'\"") if text not in ("null", "None") else None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and not str(name).endswith("threshold"):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _quoted(override: str) -> str:
    """One word of a shell, in the quotes that are easiest to read."""
    if "'" in override and not set('"$`\\\\!') & set(override):
        return f'"{override}"'
    return shlex.quote(override)


def _plain(value: object) -> str:
    return "null" if value is None else str(value)
