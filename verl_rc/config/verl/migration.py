"""Translating recipes, overrides and run files of any verl release since August 2025 to overrides of this
project."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_rc.config.errors import shortened
from verl_rc.config.plain_yaml import LARGEST, load_yaml
from verl_rc.config.processes import in_session, kill_session
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.rollout_correction_legacy import VERLS_FIELDS, flatten, import_legacy, is_legacy_key
from verl_rc.config.verl.keys import moved, translate_key, with_verls_defaults
from verl_rc.config.verl.refused import DEAD_IN_VERL, RENAMED

SUFFIX = ".sh"
_SECONDS = 20
_SECONDS_OF_BACKGROUND = 2
"""Time limit of a trainer that a script starts in the background to record its arguments."""
_MOST_MESSAGES = 1 << 16
"""Bytes that are kept of a script's output, from its end."""
_STARTERS = ("python", "python3", "ray", "torchrun")
"""Programs that recipes start a trainer with; they are replaced by a script that records its arguments."""
_HARMLESS = (
    "basename",
    "cat",
    "cut",
    "date",
    "dirname",
    "env",
    "expr",
    "nohup",
    "nproc",
    "realpath",
    "seq",
    "tr",
    "wc",
)
"""Programs that recipes fill their variables with, or call others through; by themselves they read and print.
"""
_RECORDER = """#!{bash}
printf '%s\\0' "$@" >> '{record}'
printf '\\n\\0' >> '{record}'
"""
_LIMITED = 'ulimit -f 65536; exec "$0" "$@"'
"""Files of a script, its messages among them, have at most 64 MiB."""
_PRELUDE = """command_not_found_handle() { return 0; }
export -f command_not_found_handle
"""
"""A bash function with which every other program that is called by name does nothing and succeeds."""


def is_recipe_script(argument: str) -> bool:
    """Whether a command line's argument is a shell script rather than ``key=value``."""
    return argument.endswith(SUFFIX) and "=" not in argument


def arguments_of_script(script: str, further: Sequence[str] = ()) -> list[str]:
    """The overrides and options with which ``script``, called with ``further``, would start ``main_ppo``.

    The script runs in bash, which expands variables, conditions and arrays: read only scripts that you would
    start. Python, Ray and all other programs called by name are replaced by programs that record their
    arguments or do nothing; what else it starts ends with it. Raises ``ValueError`` for a script that does
    not exist, does not start ``main_ppo`` exactly once, or does not end.
    """
    if not Path(script).is_file():
        raise ValueError(f"a recipe must be an existing shell script, got {script!r}: there is no such file")
    calls = [call for call in map(_trainer_call, _recorded_calls(script, further)) if call is not None]
    trainers = [arguments for module, arguments in calls if module.endswith(".main_ppo")]
    if len(trainers) != 1:
        modules = ", ".join(module for module, _ in calls) or "nothing with `python -m`"
        raise ValueError(
            f"{script} must start main_ppo once, but it starts {modules}; pass the overrides of one run "
            "themselves"
        )
    return trainers[0]


def _recorded_calls(script: str, further: Sequence[str]) -> list[list[str]]:
    """The arguments of every program in ``_STARTERS`` that the script calls."""
    bash = shutil.which("bash")
    if bash is None:
        raise ValueError(
            "a shell script can be read only where there is a bash; pass the overrides themselves"
        )
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        prelude = Path(folder) / "prelude"
        programs = Path(folder) / "programs"
        record.touch()
        prelude.write_text(_PRELUDE, encoding="utf-8")
        programs.mkdir()
        for name in _STARTERS:
            (programs / name).write_text(_RECORDER.format(bash=bash, record=record), encoding="utf-8")
            (programs / name).chmod(0o700)
        for name in ("bash", "sh"):
            (programs / name).symlink_to(bash)
        for name in _HARMLESS:
            if (program := shutil.which(name)) is not None:
                (programs / name).symlink_to(program)
        environment = {**os.environ, "PATH": str(programs), "BASH_ENV": str(prelude), "PYTHON": "python"}
        status, messages = _run_to_its_end(
            [bash, "-c", _LIMITED, bash, script, *further], environment, Path(folder)
        )
        if status is None:
            raise ValueError(
                f"{script} must end by itself, but did not within {_SECONDS} s; pass the overrides"
            )
        text = record.read_text(encoding="utf-8")
    calls = [call.split("\0")[:-1] for call in text.split("\n\0")[:-1]]
    if not calls and status:
        last = (messages.strip().splitlines() or [f"exit status {status}"])[-1]
        raise ValueError(f"{script} must be a script that a bash can run, but it ended with: {last}")
    return calls


def _run_to_its_end(
    command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[int | None, str]:
    """Exit status (None: the time ran out) and messages of a command. What it has started ends with it, also
    in the background; ``folder`` is in the environment of all that."""
    with (folder / "messages").open("w+b") as messages:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,  # a pipe would stay open as long as a child in the background has it
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(_SECONDS)
            deadline = time.monotonic() + _SECONDS_OF_BACKGROUND
            while any(in_session(process.pid, str(folder))) and time.monotonic() < deadline:
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_session(process.pid, str(folder))
            process.wait()
        messages.seek(max(0, messages.seek(0, os.SEEK_END) - _MOST_MESSAGES))
        return status, messages.read().decode("utf-8", "replace")


def _trainer_call(call: Sequence[str]) -> tuple[str, list[str]] | None:
    """Module and arguments of ``python -m module arguments``, also behind ``ray job submit … --``."""
    for position, argument in enumerate(call[:-1]):
        if argument == "-m" and re.fullmatch(r"[\w.]+", call[position + 1]):
            return call[position + 1], list(call[position + 2 :])
    return None


_SECTION = "algorithm.rollout_correction"
_OWN_LEAVES = set(RolloutCorrectionConfig.model_fields) - set(VERLS_FIELDS)
"""Fields that no release of verl has: there is nothing to translate."""


@dataclass(frozen=True)
class Migration:
    """The translated overrides, and notes on every change."""

    overrides: list[str]
    """``key=value`` of this project, unquoted."""
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
    """Translate ``key=value`` overrides, YAML run files and shell scripts, given in any order; later ones
    win.

    ``options`` are ``era`` and ``k1_bound_convention`` of ``import_legacy``, for keys that do not tell.
    Raises ``ValueError`` for what is neither an override nor a file, and for correction settings that no
    release accepted.
    """
    leaves = with_verls_defaults(
        dict(pair for argument in _overrides_of(arguments) for pair in _read(argument))
    )
    correction = {key: value for key, value in leaves.items() if is_correction_key(key)}
    overrides = []
    notes = [
        f"{key}: verl's newest release has the key and never reads it."
        for key in DEAD_IN_VERL
        if key in leaves
    ]
    for key, value in leaves.items():
        if key in correction:
            continue
        current_key = moved(key, RENAMED)
        translation = translate_key(current_key, value, leaves)
        if translation.problem is not None:
            notes.append(f"{key} is left out: {translation.problem}.")
        elif translation.accepted:
            notes.append(f"{key}={value} is left out: it says what happens anyway.")
        else:
            if translation.key != key:
                notes.append(f"{key} is {translation.key} here.")
            overrides.append(f"{translation.key}={_plain(translation.value)}")
    if correction:
        preset = correction.pop(f"{_SECTION}.preset", None)
        if preset is not None:
            overrides.append(f"{_SECTION}.preset={preset}")
    if correction:
        fields, correction_notes = import_legacy({**correction, **(options or {})})
        overrides += [f"{_SECTION}.{name}={_plain(value)}" for name, value in fields.items()]
        notes += correction_notes
    return Migration(overrides, notes)


def legacy_translation(overrides: Sequence[str]) -> str | None:
    """A message with the translation when ``overrides`` hold correction keys of an earlier release; None when
    they hold none."""
    pairs = [
        (key.lstrip("+"), value) for key, _, value in (override.partition("=") for override in overrides)
    ]
    legacy = [f"{key}={value}" for key, value in pairs if is_legacy_key(key)]
    if not legacy:
        return None
    legacy_keys = ", ".join(shortened(pair) for pair in legacy)
    try:
        migration = migrate([f"{key}={value}" for key, value in pairs if is_correction_key(key)])
    except ValueError as error:
        return f"{legacy_keys} cannot be translated from an earlier verl release: {error}."
    notes = " ".join(migration.notes)
    if not migration.overrides:
        return (
            f"{legacy_keys}: keys of an earlier verl release. Drop them, nothing stands for them here "
            f"({notes})."
        )
    return (
        f"{legacy_keys}: keys of an earlier verl release. Write instead:\n"
        f"  {migration.command_line()}\n({notes})"
    )


def is_correction_key(key: str) -> bool:
    """Whether a key says how rollout and trainer are corrected, in any release."""
    return is_legacy_key(key) or (
        key.startswith(f"{_SECTION}.") and key.removeprefix(f"{_SECTION}.") not in _OWN_LEAVES
    )


def _overrides_of(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments with each shell script replaced by its overrides, without its Hydra options (verl's own
    defaults)."""
    for argument in arguments:
        if is_recipe_script(argument):
            yield from (
                override
                for override in arguments_of_script(argument)
                if "=" in override and not override.startswith("--")
            )
        else:
            yield argument


def _read(argument: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of an override or of a file."""
    key, is_override, value = argument.partition("=")
    if is_override:
        yield key.lstrip("+"), _value(key, value)
        return
    try:
        with Path(argument).open("rb") as file:
            tree = load_yaml(file.read(LARGEST + 1).decode())
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise ValueError(
            f"an argument must be key=value, a YAML file or a shell script, got {shortened(argument)!r}: "
            f"{reason}"
        ) from error
    if not isinstance(tree, dict):
        raise ValueError(f"{argument} must hold a mapping of keys, got {type(tree).__name__}")
    yield from flatten(tree)


def _value(key: str, text: str) -> Any:
    """An override's value; thresholds stay text, because 0.5_5 is no number."""
    if key.endswith(("threshold", "rollout_rs")):
        return text.strip("'\"") if text not in ("null", "None") else None
    try:
        return load_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text


def _quoted(override: str) -> str:
    """``text`` quoted as one word of a shell, in readable quotes."""
    if "'" in override and not set('"$`\\\\!') & set(override):
        return f'"{override}"'
    return shlex.quote(override)


def _plain(value: object) -> str:
    return "null" if value is None else str(value)
