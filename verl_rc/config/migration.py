"""Overrides and run files of verl, of any release since August 2025, as overrides of this project."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_rc.config.refused import RENAMED
from verl_rc.config.rollout_correction_legacy import import_legacy, is_legacy_key
from verl_rc.config.verl_keys import moved, settle_leaf

_SECTION = "algorithm.rollout_correction"


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


def migrate(arguments: Sequence[str], options: Mapping[str, str] | None = None) -> Migration:
    """Translate ``key=value`` overrides and YAML run files, given in any order; later ones win.

    ``options`` are ``era`` and ``k1_bound_convention`` of ``import_legacy``, for keys that do not tell. Raises ``ValueError`` for
    what is neither an override nor a file, and for correction settings that no release accepted.
    """
    given = dict(pair for argument in arguments for pair in _read(argument))
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
    try:
        migration = migrate([f"{key}={value}" for key, value in pairs if is_correction_key(key)])
    except ValueError as error:
        return f"{', '.join(legacy)}: keys of an earlier verl release, and they contradict each other: {error}."
    notes = " ".join(migration.notes)
    return f"{', '.join(legacy)}: keys of an earlier verl release. Write instead:\n  {migration.command_line()}\n({notes})"


def is_correction_key(key: str) -> bool:
    """Whether a key says how rollout and trainer are corrected, in any release."""
    return is_legacy_key(key) or key.startswith(f"{_SECTION}.")


def _read(argument: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of an override or of a file."""
    key, is_override, value = argument.partition("=")
    if is_override:
        yield key.lstrip("+"), _value(key, value)
        return
    path = Path(argument)
    if not path.is_file():
        raise ValueError(f"an argument must be key=value or a YAML file, got {argument!r}")
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
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


def _plain(value: object) -> str:
    return "null" if value is None else str(value)
