"""The command line: Hydra's own options and overrides, in any order."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from verl_rc.config.errors import ConfigError, shortened

COMMANDS = ("cfg", "info", "help", "hydra_help", "shell_completion", "multirun", "run")
"""Options that say what happens with the configuration; at most one may be given."""


def option_parser() -> ArgumentParser:
    """Hydra's parser of its own options."""
    return get_args_parser()


def parse(arguments: Sequence[str]) -> Namespace:
    """Options by Hydra's names and, in ``overrides``, the rest. Raises ``ConfigError``."""
    parser = option_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args([str(argument) for argument in arguments])
    named = [f"--{name.replace('_', '-')}" for name in COMMANDS if getattr(given, name)]
    if len(named) > 1:
        raise ConfigError(f"at most one of {', '.join(named)} may be given; drop the others.")
    if given.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun is refused: give a run's resolved_config.yaml with --config-dir and --config-name."
        )
    if (given.resolve or given.package is not None) and given.cfg is None:
        raise ConfigError("--resolve and --package belong to --cfg job|hydra|all; add it, or drop them.")
    for option in ("config_path", "config_dir"):
        folder = getattr(given, option)
        if folder is not None and "://" not in folder:
            _check_folder(f"--{option.replace('_', '-')}", Path(folder))
    for override in given.overrides:
        if not override.startswith("~") and "=" not in override:
            raise ConfigError(f"an override must have the form key=value, got {shortened(override)!r}.")
    return given


def sources_of(given: Namespace) -> list[str]:
    """The options that say where files are, as they may be typed again."""
    names = ("config_name", "config_path", "config_dir")
    return [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in names if getattr(given, name) is not None]


def _check_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{option} must name an existing folder, got {shortened(str(folder))!r}.")
    if next(folder.rglob("*.yaml"), None) is None:
        raise ConfigError(f"{option} must name a folder of .yaml files, but there is none in {shortened(str(folder))!r}.")


def _refuse(message: str) -> NoReturn:
    what, _, unknown = message.partition("unrecognized arguments: ")
    raise ConfigError(
        "options are --config-name, --config-dir, --config-path, --cfg, --info, --multirun and others that --help lists; "
        f"{what}{f'got {shortened(unknown)!r}' if unknown else ''}."
    )
