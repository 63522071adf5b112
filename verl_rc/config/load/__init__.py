"""From command line and YAML to a valid configuration: the only module that knows Hydra and OmegaConf.

Hydra composes what was *given* (over an empty tree, so that nothing has two defaults); the schema adds the defaults
and decides.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from verl_rc.config.base import StrictModel
from verl_rc.config.checks import check_files, check_run
from verl_rc.config.errors import ConfigError, shortened
from verl_rc.config.load.problems import in_sentences, refuse_huge
from verl_rc.config.migration import legacy_translation
from verl_rc.config.nearest import nearest_key
from verl_rc.config.refused import REFUSALS
from verl_rc.config.rollout_correction import preset_fields
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import defaults, has_key, known_keys, leads_to_leaf
from verl_rc.config.secrets import public_values
from verl_rc.config.verl_keys import Settled, is_verl_key, refused_for, settle

Schema = TypeVar("Schema", bound=StrictModel)

CORRECTION = "algorithm.rollout_correction"
_TEXT_KEYS = tuple(f"{CORRECTION}.{leaf}" for leaf in ("preset", "rollout_rs", "rollout_rs_threshold", "rollout_is_threshold"))
_EMPTY = "verl_rc_empty"
_VERL_TRAINER = "ppo_trainer"
_VERL_TRAINERS = {
    f"ppo_{name}_trainer": f"{name} is not supported; drop --config-name for FSDP"
    for name in ("megatron", "veomni", "torchtitan", "automodel")
}
_UNDERSCORED = re.compile(r"^\s*(rollout_(?:is|rs)_threshold)\s*:\s*([0-9.]+_[0-9._]+)\s*(?:#.*)?$", re.MULTILINE)


def load_run_config(overrides: Sequence[str]) -> RunConfig:
    """The configuration that ``key=value`` overrides mean, checked as far as possible without touching files or Ray.

    Raises ``ConfigError``.
    """
    config = load_config(RunConfig, overrides)
    check_run(config)
    return config


def load_config(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Compose and validate any schema. ``arguments`` as on the command line: overrides, ``--config-name``,
    ``--config-dir``.

    Raises ``ConfigError`` for everything that is wrong with them.
    """
    options, overrides = _split_arguments(arguments)
    translation = legacy_translation(overrides) if schema is RunConfig else None
    if translation is not None:
        raise ConfigError(translation)
    prepared = [_prepare_override(schema, override) for override in overrides]
    given = _compose(schema, options, prepared)
    settled = settle(given) if schema is RunConfig else Settled(given, [])
    _refuse_unknown(schema, settled.tree)
    refuse_huge(settled.tree)
    _apply_preset(settled.tree)
    try:
        config = schema.model_validate(settled.tree)
    except ValidationError as error:
        raise ConfigError(in_sentences(schema, error, settled.tree)) from error
    if isinstance(config, RunConfig):
        settled.check(config)
    return config


def run_with_config(schema: type[Schema], run: Callable[[Schema], None], prog: str) -> None:
    """Process entry: load ``sys.argv``, run, and exit 0; 2 for a configuration mistake, 1 for a failure, 130 for
    Ctrl-C.
    """
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(f"python -m {prog} key=value …   (keys: docs/configuration.md)\n")
        return
    try:
        if "--multirun" in arguments or "-m" in arguments:
            _multirun(schema, run, [a for a in arguments if a not in ("--multirun", "-m")])
        else:
            _run_one(schema, run, arguments)
    except ConfigError as error:
        sys.stderr.write(f"configuration error:\n{error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


def _run_one(schema: type[Schema], run: Callable[[Schema], None], arguments: Sequence[str]) -> None:
    config = load_config(schema, arguments)
    if isinstance(config, RunConfig):
        check_run(config)
        check_files(config)
    run(config)


def _multirun(schema: type[Schema], run: Callable[[Schema], None], arguments: Sequence[str]) -> None:
    """Let Hydra sweep over comma lists, one run after the other."""
    options, overrides = _split_arguments(arguments)
    prepared = [override if override.startswith("hydra.") else _prepare_override(schema, override) for override in overrides]
    ConfigStore.instance().store(name=_EMPTY, node={})

    @hydra.main(version_base=None, config_name=_EMPTY, config_path=None)
    def job(_: Any) -> None:
        chosen = HydraConfig.get().overrides.task
        _run_one(schema, run, [*options_as_arguments(options), *chosen])

    no_copy = "hydra.output_subdir=null"  # of the overrides, which may hold secrets
    sys.argv = [sys.argv[0], "--multirun", no_copy, *prepared]
    job()


def options_as_arguments(options: Mapping[str, str]) -> list[str]:
    """``--config-name`` and ``--config-dir`` as they were typed."""
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def save_resolved_config(config: StrictModel, folder: Path) -> Path:
    """Write every value of ``config`` to ``resolved_config.yaml``; the file can be given back with
    ``--config-name``.
    """
    path = folder / "resolved_config.yaml"
    path.write_text(yaml.safe_dump(public_values(config), sort_keys=False), encoding="utf-8")
    return path


def _split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    short = {"-cn": "config-name", "-cd": "config-dir", "-cp": "config-dir", "--config-path": "config-dir"}
    options, overrides = {}, []
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name in short or name in ("--config-name", "--config-dir"):
            options[short.get(name, name.removeprefix("--"))] = value or next(rest, "")
        elif argument.startswith("-"):
            raise ConfigError(f"options are --config-name, --config-dir, --multirun and --help; got {shortened(argument)!r}.")
        elif "=" not in argument and not argument.startswith("~"):
            raise ConfigError(f"an override must have the form key=value, got {shortened(argument)!r}.")
        else:
            overrides.append(argument)
    return options, overrides


def _prepare_override(schema: type[BaseModel], override: str) -> str:
    """Rewrite one raw override so that Hydra reads it as it was meant, and refuse keys that mean nothing."""
    if override.startswith("~"):
        _check_key(schema, override[1:].partition("=")[0])
        return override
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key == "hydra.searchpath":
        return f"hydra.searchpath={value}"
    if key.startswith("hydra."):
        raise ConfigError(refused_for([f"{key}={value}"], REFUSALS["hydra"].reason))
    _check_key(schema, key)
    if key in _TEXT_KEYS and value and value[0] not in "'\"[{" and value not in ("null", "None"):
        value = "'" + value.replace("\\", "").replace("'", "\\'") + "'"
    elif value[:2] in ("'[", '"[') and value[-2:] == f"]{value[0]}":  # a list that a shell handed over with its quotes
        value = value[1:-1]
    if value.startswith("~"):
        value = f"'{value}'"
    return f"++{key}={value}"


def _check_key(schema: type[BaseModel], key: str) -> None:
    if schema is RunConfig and (is_verl_key(key) or key.startswith(f"{CORRECTION}.preset")):
        return
    if not has_key(schema, key):
        raise ConfigError(_unknown(schema, key))


def _unknown(schema: type[BaseModel], key: str) -> str:
    known = list(known_keys(schema))
    return f"{shortened(key)} is not a known key; the nearest is {nearest_key(key, known)}. All keys: docs/configuration.md."


def _compose(schema: type[BaseModel], options: Mapping[str, str], overrides: list[str]) -> dict[str, Any]:
    """What was given, by files and overrides, as a plain tree with interpolations resolved against the defaults."""
    try:
        composed = _with_run_file(options, overrides) if options else _of_overrides(overrides)
        given = OmegaConf.to_container(composed)
        assert isinstance(given, dict)
        if "${" not in str(given):
            return {str(key): value for key, value in given.items()}
        resolved = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(defaults(schema)), composed), resolve=True)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, RecursionError, ValueError) as error:
        raise ConfigError(_unreadable(error, options, overrides)) from error
    assert isinstance(resolved, dict)
    return _only_given(given, resolved)


def _unreadable(error: Exception, options: Mapping[str, str], overrides: list[str]) -> str:
    """What is wrong with arguments that Hydra cannot make a tree of, and what to write."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    culprit = next((override.lstrip("+") for override in overrides if _parsing_fails(override)), None)
    if culprit is not None:
        return (
            f"the overrides cannot be read: {shortened(culprit)!r} must be key=value in Hydra's grammar, in which a value with "
            f"special characters stands in quotes of its own, in a shell 'key=\"value\"'. Hydra says: {shortened(reason)}."
        )
    where = f" of --config-name={options['config-name']}" if "config-name" in options else ""
    if "Could not delete" in reason:
        return f"the overrides cannot be read: {reason} ~key takes back what a run file gave, and none gave this; drop it."
    at = re.search(r"full_key: (\S+)", str(error))
    return f"the overrides cannot be read{where}: {shortened(reason)}" + (f" (at {at[1]})." if at else ".")


def _parsing_fails(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        return True
    return False


def _of_overrides(overrides: list[str]) -> DictConfig:
    """The tree of overrides alone, read by Hydra's grammar; Hydra's own composition is needed for files, and slow."""
    tree = OmegaConf.create({})
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            key = override.key_or_group
            raise ConfigError(
                f"{override.input_line} is several values: write --multirun for a run each, or {key}=[…] for a list."
            )
        if override.is_delete():
            raise HydraException(f"Could not delete from config. '{override.key_or_group}' does not exist.")
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
    return tree


def _with_run_file(options: Mapping[str, str], overrides: list[str]) -> DictConfig:
    """What the run file says, and the overrides over it."""
    folder = options.get("config-dir")
    if folder is not None:
        _refuse_unquoted_thresholds(Path(folder))
    name = options.get("config-name", _EMPTY).removesuffix(".yaml")
    if name in _VERL_TRAINERS:
        raise ConfigError(f"--config-name={name} is refused: {_VERL_TRAINERS[name]}.")
    for empty in (_EMPTY, _VERL_TRAINER):  # verl's run files begin with the latter, whose values are defaults here
        ConfigStore.instance().store(name=empty, node={})
    GlobalHydra.instance().clear()
    directory = None if folder is None else str(Path(folder).resolve())
    context = (
        hydra.initialize(config_path=None, version_base=None)
        if directory is None
        else hydra.initialize_config_dir(config_dir=directory, version_base=None)
    )
    with context:
        return hydra.compose(config_name=name, overrides=overrides)


def _only_given(given: Mapping[Any, Any], resolved: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(key): _only_given(value, resolved[key])
        if isinstance(value, Mapping) and isinstance(resolved[key], Mapping)
        else resolved[key]
        for key, value in given.items()
    }


def _refuse_unquoted_thresholds(folder: Path) -> None:
    """YAML reads 0.5_5 as the number 0.55; refuse it wherever it stands without quotes."""
    for path in sorted(folder.rglob("*.y*ml")):
        for found in _UNDERSCORED.finditer(path.read_text(encoding="utf-8")):
            if isinstance(yaml.safe_load(found[2]), str):
                continue
            raise ConfigError(
                f"{path}: {found[1]} must be quoted, because YAML reads {found[2]} as a number without its underscore: "
                f'write {found[1]}: "{found[2]}".'
            )


def _refuse_unknown(schema: type[BaseModel], given: Mapping[str, Any], prefix: str = "") -> None:
    """Check the keys that came from YAML files; those of overrides were checked before."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        _check_key(schema, key)
        if isinstance(value, Mapping) and not leads_to_leaf(schema, key):
            _refuse_unknown(schema, value, f"{key}.")


def _apply_preset(given: dict[str, Any]) -> None:
    """Fill the leaves of the correction section that nobody gave from the preset named there."""
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
    for leaf, value in fields.items():
        section.setdefault(leaf, value)
