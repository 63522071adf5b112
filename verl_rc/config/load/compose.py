"""Composing files, groups and overrides into one tree of given values, with Hydra."""

import copy
import functools
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_rc.config.errors import ConfigError, nearest_key, shortened
from verl_rc.config.rollout_correction import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs"
"""The configuration groups that come with the package."""

_PPO = "ppo_trainer"
_EMPTY = "verl_rc_empty"
_WITH_GROUPS = "verl_rc_run_file"
_VERL_TRAINERS = {
    f"ppo_{name}_trainer": f"{name} is not supported; drop --config-name for FSDP"
    for name in ("megatron", "veomni", "torchtitan", "automodel")
}
_UNDERSCORED = re.compile(
    r"^\s*(rollout_(?:is|rs)_threshold)\s*:\s*([0-9.]+_[0-9._]+)\s*(?:#.*)?$", re.MULTILINE
)


class Composer:
    """Hydra's composition over the folders of a command line and, with ``has_groups``, the package's
    groups."""

    def __init__(self, options: Namespace, has_groups: bool) -> None:
        name = options.config_name or (_PPO if has_groups else _EMPTY)
        self.primary: str = name.removesuffix(".yaml")
        if self.primary in _VERL_TRAINERS:
            raise ConfigError(f"--config-name={name} is refused: {_VERL_TRAINERS[self.primary]}.")
        for folder in (options.config_path, options.config_dir):
            if folder is not None and "://" not in folder:
                _refuse_unquoted_thresholds(Path(folder))
        version.setbase(None)
        self.loader = ConfigLoaderImpl(_search_path(options, has_groups))
        self.hydra = Hydra(task_name=self.primary, config_loader=self.loader)
        self._has_groups = has_groups
        self._names_files = bool(options.config_name or options.config_path or options.config_dir)
        if has_groups and options.config_name and any(map(self.is_group, options.overrides)):
            self.primary = self._run_file_with_groups()

    def is_group(self, override: str) -> bool:
        """Whether an override chooses from a group instead of setting a key."""
        group = _key_of(override).partition("@")[0]
        return bool(group) and "." not in group and self.loader.repository.group_exists(group)

    def groups(self) -> list[str]:
        """The available groups, without Hydra's own."""
        if not (self._has_groups or self._names_files):
            return []
        return [group for group in self.hydra.list_all_config_groups() if not group.startswith("hydra")]

    def prepare_groups(self, overrides: Sequence[str]) -> list[str]:
        """Group choices in Hydra's grammar: ``+`` for a group that is not in the defaults list, ``~`` for no
        choice.

        Raises ``ConfigError`` for a choice that does not exist and for a group that is given twice.
        """
        if not overrides:
            return []
        for group, times in Counter(map(_key_of, overrides)).items():
            if times > 1:
                choices = " and ".join(override for override in overrides if _key_of(override) == group)
                raise ConfigError(
                    f"the group {group} must be given once, got {choices}; drop one, or set single keys over "
                    "it."
                )
        listed_groups = self._listed_groups(self.primary)
        return [
            self._prepare_group(override, listed_groups)
            for override in OverridesParser.create().parse_overrides([*overrides])
        ]

    def _listed_groups(self, primary: str) -> list[str]:
        """The groups for which the defaults list of a primary configuration has a place, in its order."""
        from_last_to_first = self.loader.compute_defaults_list(
            primary, [], RunMode.RUN
        ).overrides.known_choices
        return [*reversed(from_last_to_first)]

    def _run_file_with_groups(self) -> str:
        """A primary configuration of the run file and, over it, the package's groups that it has no place
        for.

        Over it, because the command line, which chooses from them, wins over files.
        """
        listed_groups = self._listed_groups(self.primary)
        absent_groups: list[Any] = [
            {group: None} for group in self._listed_groups(_PPO) if group not in listed_groups
        ]
        ConfigStore.instance().store(
            name=_WITH_GROUPS, node={"defaults": [self.primary, *absent_groups, "_self_"]}
        )
        return _WITH_GROUPS

    def _prepare_group(self, override: Override, listed_groups: Container[str]) -> str:
        key = _key_of(str(override.input_line))
        text = str(override.input_line).lstrip("+")
        if override.is_delete():
            return text
        if override.is_sweep_override():
            return text if key in listed_groups else f"+{text}"
        value = override.value()
        if value is None:
            return f"~{key}"
        for choice in value if isinstance(value, list) else [value]:
            if not self.loader.repository.config_exists(f"{override.key_or_group}/{choice}"):
                choices = self.loader.get_group_options(override.key_or_group)
                raise ConfigError(
                    f"{key} must be one of {', '.join(choices)}; got {shortened(str(choice))!r}, did you "
                    f"mean {nearest_key(str(choice), choices)}?"
                )
        return text if key in listed_groups else f"+{text}"

    def compose(self, file_overrides: Sequence[str], keys: Sequence[str]) -> DictConfig:
        """The tree of the files and groups that ``file_overrides`` choose, with the overrides ``keys``
        applied to it."""
        parser = OverridesParser.create()
        for override in parser.parse_overrides([*file_overrides, *keys]):
            if override.is_sweep_override():
                raise ConfigError(
                    f"{override.input_line} is several values: write --multirun for a run each, or "
                    f"{override.key_or_group}=[…] for a list."
                )
        if self._names_files or any(override.startswith("hydra.") for override in file_overrides):
            tree = _tree_of_files(self.loader, self.primary, file_overrides)
        else:
            tree = copy.deepcopy(_tree_of_package(self.primary, self._has_groups, tuple(file_overrides)))
        ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides([*keys]), tree)
        return tree

    def sweep(self, prepared: Sequence[str]) -> list[list[str]]:
        """The overrides of every run of a sweep."""
        parsed = OverridesParser.create(config_loader=self.loader).parse_overrides([*prepared])
        (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        return runs


def _tree_of_files(loader: ConfigLoaderImpl, primary: str, overrides: Sequence[str]) -> DictConfig:
    tree = loader.load_configuration(primary, [*overrides], RunMode.RUN)
    OmegaConf.set_struct(tree, False)
    del tree["hydra"]
    return tree


@functools.lru_cache(maxsize=256)
def _tree_of_package(primary: str, has_groups: bool, overrides: tuple[str, ...]) -> DictConfig:
    """The tree of the package's own files, cached because they do not change while a process runs."""
    search_path = _search_path(Namespace(config_path=None, config_dir=None), has_groups)
    return _tree_of_files(ConfigLoaderImpl(search_path), primary, overrides)


def _search_path(options: Namespace, has_groups: bool) -> ConfigSearchPath:
    """Where Hydra looks for files, in this order: --config-path, --config-dir, the package's folder, and the
    presets.

    Hydra would let --config-path take the place of the package's folder; users of it want the groups all the
    same.
    """
    folders = {
        "main": options.config_path,
        "command-line": options.config_dir,
        "verl_rc": str(CONFIGS) if has_groups else None,
    }
    path = create_config_search_path(None)
    for provider, folder in folders.items():
        if folder is not None:
            url = folder if "://" in folder else f"file://{Path(folder).resolve()}"
            path.prepend(provider=provider, path=url, anchor=SearchPathQuery(provider="schema"))
    ConfigStore.instance().store(name=_EMPTY, node={})
    if has_groups:
        _store_presets()
    return path


@functools.cache
def _store_presets() -> None:
    """The group ``correction``: one choice for each preset, without files."""
    store = ConfigStore.instance()
    for preset in PRESETS:
        node = {"algorithm": {"rollout_correction": {"preset": preset}}}
        store.store(
            group="correction", name=preset, node=node, package="_global_", provider="verl_rc presets"
        )


def _key_of(override: str) -> str:
    """The key or group of an override, with the package of a group."""
    return override.lstrip("+~").partition("=")[0]


def _refuse_unquoted_thresholds(folder: Path) -> None:
    """Refuse unquoted thresholds such as 0.5_5, which YAML reads as the number 0.55."""
    for path in sorted(folder.rglob("*.y*ml")):
        for match in _UNDERSCORED.finditer(path.read_text(encoding="utf-8")):
            if isinstance(yaml.safe_load(match[2]), str):
                continue
            raise ConfigError(
                f"{path}: {match[1]} must be quoted, because YAML reads {match[2]} as a number without its "
                "underscore: "
                f'write {match[1]}: "{match[2]}".'
            )
