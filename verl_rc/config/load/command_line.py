"""The command line: Hydra's options and overrides in any order, and the output of options that print instead
of running."""

import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel

from verl_rc.config.errors import ConfigError, shortened
from verl_rc.config.load.compose import CONFIGS, Composer
from verl_rc.config.load.given import composing, every_key, plain_tree, prepare, translated_tree
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import override_without_secrets, without_secrets

COMMANDS = ("cfg", "info", "help", "hydra_help", "shell_completion", "multirun", "run")
"""Options that print instead of running; at most one may be given."""


def parse(arguments: Sequence[str]) -> Namespace:
    """Options by Hydra's names and, in ``overrides``, the rest. Raises ``ConfigError``."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args([str(argument) for argument in arguments])
    commands = [f"--{name.replace('_', '-')}" for name in COMMANDS if getattr(options, name)]
    if len(commands) > 1:
        raise ConfigError(f"at most one of {', '.join(commands)} may be given; drop the others.")
    if options.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun is refused: give a run's resolved_config.yaml with --config-dir and "
            "--config-name."
        )
    if (options.resolve or options.package is not None) and options.cfg is None:
        raise ConfigError("--resolve and --package belong to --cfg job|hydra|all; add it, or drop them.")
    for option in ("config_path", "config_dir"):
        folder = getattr(options, option)
        if folder is not None and "://" not in folder:
            _check_folder(f"--{option.replace('_', '-')}", Path(folder))
    for override in options.overrides:
        if not override.startswith("~") and "=" not in override:
            raise ConfigError(f"an override must have the form key=value, got {shortened(override)!r}.")
    return options


def config_file_options(options: Namespace) -> list[str]:
    """The options that name folders and files, as typed on a command line."""
    names = ("config_name", "config_path", "config_dir")
    return [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in names
        if getattr(options, name) is not None
    ]


def _check_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{option} must name an existing folder, got {shortened(str(folder))!r}.")
    if next(folder.rglob("*.yaml"), None) is None:
        raise ConfigError(
            f"{option} must name a folder of .yaml files, but there is none in {shortened(str(folder))!r}."
        )


def _refuse(message: str) -> NoReturn:
    problem, _, unknown = message.partition("unrecognized arguments: ")
    raise ConfigError(
        "options are --config-name, --config-dir, --config-path, --cfg, --info, --multirun and others that "
        f"--help lists; {problem}{f'got {shortened(unknown)!r}' if unknown else ''}."
    )


_WIDTH = 100
_OPTIONS = """\
Options, as in Hydra:
  --cfg job|hydra|all    print the configuration and stop; --resolve: with interpolations resolved, --package KEY: one section
  --info [all|config|defaults|defaults-tree|plugins|searchpath]
                         print which files it comes from and stop
  -m, --multirun         a run for each combination of KEY=A,B and GROUP=A,B, one after the other
  --config-dir DIR       look for run files and groups in DIR, too
  --config-path DIR      look for them in DIR first
  --config-name NAME     begin with the file NAME.yaml
  --shell-completion install=bash, --hydra-help, --version
"""  # noqa: E501


def show(schema: type[BaseModel], options: Namespace, prog: str) -> bool:
    """Print what an option asks for; returns False when there is no such option and a run should start.

    Raises ``ConfigError``.
    """
    if not (options.help or options.hydra_help or options.cfg or options.info or options.shell_completion):
        return False
    with composing(options.overrides):
        _show(schema, options, prog)
    return True


def _show(schema: type[BaseModel], options: Namespace, prog: str) -> None:
    composer = Composer(options, has_groups=schema is RunConfig)
    if options.help:
        sys.stdout.write(_help(composer, prog, schema is RunConfig))
        return
    loader = _ShownLoader(schema, options.resolve, composer.loader.get_search_path())
    hydra = Hydra(task_name=prog.rpartition(".")[2], config_loader=loader)
    if options.hydra_help:
        hydra.hydra_help(None, get_args_parser(), Namespace(overrides=[]))
    elif options.shell_completion:
        hydra.shell_completion(composer.primary, options.overrides)
    else:
        prepared = prepare(schema, composer, options.overrides)
        overrides = [*prepared.group_choices, *prepared.keys]
        loader.load_configuration(
            composer.primary, overrides, RunMode.RUN
        )  # raises where Hydra would print and exit with 1
        if options.cfg:
            hydra.show_cfg(composer.primary, overrides, options.cfg, options.package, options.resolve)
        else:
            hydra.show_info(options.info, composer.primary, overrides)


class _ShownLoader(ConfigLoaderImpl):
    """Hydra's configuration loader, with the schema's defaults filled in and secrets removed."""

    def __init__(self, schema: type[BaseModel], resolve: bool, search_path: ConfigSearchPath) -> None:
        super().__init__(search_path)
        self._schema = schema
        self._resolve = resolve

    def load_configuration(self, *arguments: Any, **keywords: Any) -> DictConfig:
        """Hydra's composed configuration, with every key of the schema."""
        composed = super().load_configuration(*arguments, **keywords)
        with open_dict(composed):
            hydra = composed.pop("hydra")
        tree = plain_tree(self._schema, composed, self._resolve)
        merged = OmegaConf.merge(every_key(self._schema), translated_tree(self._schema, tree).tree)
        assert isinstance(merged, DictConfig)
        merged = OmegaConf.create(without_secrets(OmegaConf.to_container(merged)))  # type: ignore[arg-type]
        overrides: Any = OmegaConf.to_container(hydra.overrides.task)
        hydra.overrides.task = [override_without_secrets(override) for override in overrides]
        hydra.job.override_dirname = "(see hydra.overrides.task)"
        hydra.job.env_set = {}  # of no effect here, and a place where secrets are kept
        merged.hydra = hydra
        return merged


def _help(composer: Composer, prog: str, is_run: bool) -> str:
    parts = [f"python -m {prog} [OPTION ...] [GROUP=CHOICE ...] [KEY=VALUE ...]\n", _OPTIONS]
    groups = composer.groups()
    if groups:
        parts.append("Groups (GROUP=CHOICE sets several keys at once; a KEY=VALUE wins over every group):")
        for group in groups:
            choices = f"  {group}: {', '.join(composer.loader.get_group_options(group))}"
            parts.append(textwrap.fill(choices, _WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    if is_run:
        parts.append(
            f"\nFor example: python -m {prog} task=digits hardware=cpu correction=decoupled_seq_is "
            "trainer.seed=2\n"
            f"Every key with its default and meaning: {CONFIGS.resolve() / 'reference.yaml'}\n"
            "What presets of correction stand for: verl-rc presets. What a run will do: verl-rc explain, "
            "with the same arguments."
        )
    return "\n".join(parts) + "\n"
