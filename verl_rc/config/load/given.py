"""What was given, by files, groups and overrides, as a plain tree in the schema's keys alone."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.compose import Composer
from verl_rc.config.load.overrides import CORRECTION, check_keys, prepare, unreadable
from verl_rc.config.load.problems import refuse_huge
from verl_rc.config.rollout_correction import preset_fields
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import defaults
from verl_rc.config.verl_keys import Settled, settle

MISSING = "???"
"""Hydra's mark of a value that is still to be given."""


def given_tree(schema: type[BaseModel], given: Namespace) -> Settled:
    """Compose a command line, resolve its interpolations against the defaults, and fill in the preset that it names.

    Raises ``ConfigError``.
    """
    with composing(given.overrides):
        composer = Composer(given, has_groups=schema is RunConfig)
        prepared = prepare(schema, composer, given.overrides)
        tree = plain_tree(schema, composer.compose(prepared.of_files, prepared.keys), resolve=True)
    return settled_tree(schema, tree)


def combinations(schema: type[BaseModel], given: Namespace) -> list[list[str]]:
    """The overrides of every run of a sweep. Raises ``ConfigError``."""
    with composing(given.overrides):
        composer = Composer(given, has_groups=schema is RunConfig)
        prepared = prepare(schema, composer, given.overrides)
        return composer.sweep([*prepared.of_files, *prepared.keys])


@contextlib.contextmanager
def composing(overrides: Sequence[str]) -> Iterator[None]:
    """What Hydra, OmegaConf and the YAML reader raise about arguments and files becomes a ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, RecursionError, ValueError) as error:
        raise ConfigError(unreadable(error, overrides)) from error


def settled_tree(schema: type[BaseModel], tree: dict[str, Any]) -> Settled:
    """A composed tree without verl's spellings and without the preset's name."""
    settled = settle(tree) if schema is RunConfig else Settled(tree, [])
    check_keys(schema, settled.tree)
    refuse_huge(settled.tree)
    _apply_preset(settled.tree)
    return settled


def plain_tree(schema: type[BaseModel], composed: DictConfig, resolve: bool) -> dict[str, Any]:
    """What was composed, without values that are still to be given; interpolations may name keys that were not."""
    given = OmegaConf.to_container(composed)
    assert isinstance(given, dict)
    resolved: Any = given
    if resolve and "${" in str(given):
        resolved = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(defaults(schema)), composed), resolve=True)
    return _only_given(given, resolved)


def _only_given(given: Mapping[Any, Any], resolved: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(key): _only_given(value, resolved[key])
        if isinstance(value, Mapping) and isinstance(resolved[key], Mapping)
        else resolved[key]
        for key, value in given.items()
        if value != MISSING
    }


def _apply_preset(given: dict[str, Any]) -> None:
    """Fill the leaves of the correction section that were not given from the preset named there."""
    section = given.get("algorithm", {})
    section = section.get("rollout_correction") if isinstance(section, Mapping) else None
    if not isinstance(section, dict) or "preset" not in section:
        return
    name = section.pop("preset")
    if name is None:
        return
    try:
        fields = preset_fields(str(name))
    except ValueError as error:
        raise ConfigError(f"{CORRECTION}.preset: {error}") from error
    # Said even where it is the default, so that preset=disabled is told from a correction that nobody chose.
    for leaf, value in {"rollout_is": None, **fields}.items():
        section.setdefault(leaf, value)
