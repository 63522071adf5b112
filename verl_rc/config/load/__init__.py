"""From command line and YAML to a valid configuration: the only package that knows Hydra and OmegaConf.

Hydra composes what was *given* (files, groups and overrides, over an empty tree, so that nothing has two
defaults); the schema adds the defaults and decides.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from verl_rc.config.checks import check_run
from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import FolderLostError
from verl_rc.config.load.command_line import COMMANDS, config_file_options, parse, show
from verl_rc.config.load.given import combinations, error_sentences, given_tree
from verl_rc.config.paths import check_files
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import StrictModel, override_without_secrets, public_values, with_value
from verl_rc.printable import print_uncaught_exceptions, write_error

Schema = TypeVar("Schema", bound=StrictModel)


def load_run_config(arguments: Sequence[str]) -> RunConfig:
    """The configuration that a command line means, checked as far as possible without touching files or Ray.

    Raises ``ConfigError``.
    """
    config = load_config(RunConfig, arguments)
    check_run(config)
    return config


def load_config(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Compose and validate any schema. ``arguments`` as on the command line: overrides, choices of groups,
    ``--config-name``, ``--config-path`` and ``--config-dir``.

    Raises ``ConfigError`` for invalid arguments, unknown keys and invalid values.
    """
    options = parse(arguments)
    command = next((name for name in COMMANDS if getattr(options, name)), None)
    if command is not None:
        raise ConfigError(
            f"--{command.replace('_', '-')} belongs to python -m verl_rc.main_ppo; drop it here."
        )
    return _load(schema, options)


def run_with_config(schema: type[Schema], run: Callable[[Schema], None], prog: str) -> None:
    """Process entry: load ``sys.argv``, run, and exit 0; 2 for a configuration mistake, 1 for a failure, 130
    for Ctrl-C.
    """
    print_uncaught_exceptions()
    try:
        options = parse(sys.argv[1:])
        # W&B and Ray record the command line of their process.
        sys.argv[1:] = [override_without_secrets(argument) for argument in sys.argv[1:]]
        if options.multirun:
            _run_all(schema, run, options)
        elif not show(schema, options, prog):
            run(_checked(_load(schema, options)))
    except ConfigError as error:
        write_error(f"configuration error:\n{error}\n")
        raise SystemExit(2) from None
    except FolderLostError as error:
        write_error(f"the run ended: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        write_error("interrupted\n")
        raise SystemExit(130) from None


def save_resolved_config(config: StrictModel, folder: Path) -> Path:
    """Write every value of ``config`` to ``resolved_config.yaml``; the file can be given back with
    ``--config-name``.
    """
    path = folder / "resolved_config.yaml"
    path.write_text(yaml.safe_dump(public_values(config), sort_keys=False), encoding="utf-8")
    return path


def _load(schema: type[Schema], options: Namespace) -> Schema:
    translation = given_tree(schema, options)
    try:
        config = schema.model_validate(translation.tree)
    except ValidationError as error:
        raise ConfigError(error_sentences(schema, error, translation.tree)) from error
    if isinstance(config, RunConfig):
        translation.check(config)
    return config


def _checked(config: Schema) -> Schema:
    if isinstance(config, RunConfig):
        check_run(config)
        check_files(config)
    return config


def _run_all(schema: type[Schema], run: Callable[[Schema], None], options: Namespace) -> None:
    """Run each combination of the given values in sequence; all are checked before the first starts."""
    sweep = combinations(schema, options)
    configs = [_load(schema, parse([*config_file_options(options), *overrides])) for overrides in sweep]
    configs = [_checked(config) for config in _with_separate_folders(configs)]
    common = set.intersection(*map(set, sweep))
    for number, (overrides, config) in enumerate(zip(sweep, configs, strict=True), start=1):
        choices = [
            override_without_secrets(override).lstrip("+") for override in overrides if override not in common
        ]
        write_error(f"run {number} of {len(configs)}: {' '.join(choices)}\n")
        run(config)


def _with_separate_folders(configs: Sequence[Schema]) -> list[Schema]:
    """The configurations of a sweep; runs with the same folder get a subfolder each, so that none resumes
    from another."""
    key = "trainer.default_local_dir" if isinstance(configs[0], RunConfig) else "trainer.output_dir"
    folders = [attrgetter(key)(config) for config in configs]
    return [
        with_value(config, key, f"{folder}/{number}") if folders.count(folder) > 1 else config
        for number, (config, folder) in enumerate(zip(configs, folders, strict=True))
    ]
