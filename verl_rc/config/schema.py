"""``StrictModel``, the base class of all configuration sections, and functions over the tree of sections."""

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from verl_rc.config.errors import shortened

Model = TypeVar("Model", bound=BaseModel)
_LONGEST_NAME = 255


class StrictModel(BaseModel):
    """A section of the configuration: immutable once built, unknown keys refused, defaults checked like given
    values, numbers finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def follows(key: str, **bounds: Any) -> Any:
    """A field that takes the value of another ``key`` where it is null.

    ``RunConfig`` fills it in, so that its type needs no None unless the other key may be null.
    """
    return Field(None, validate_default=False, json_schema_extra={"follows": key}, **bounds)


def followed_key(field: FieldInfo) -> str | None:
    """The key whose value a field takes where it is null."""
    return str(field.json_schema_extra["follows"]) if isinstance(field.json_schema_extra, dict) else None


def may_be_null(field: FieldInfo) -> bool:
    """Whether null is a value of the field."""
    return field.default is None or types.NoneType in get_args(field.annotation)


def _usable_path(text: str) -> str:
    if text == "None":
        raise ValueError("a path must not be None; write null for none")
    if not text.strip() or "\0" in text:
        raise ValueError(f"a path must not be empty or hold NUL, got {text!r}")
    if any(len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in Path(text).parts):
        raise ValueError(
            f"every name in a path must have at most {_LONGEST_NAME} bytes, got {shortened(text)!r}"
        )
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError as error:
        raise ValueError(f"a path that begins with ~ must name a user with a home, got {text!r}") from error


UserPath = Annotated[str, AfterValidator(_usable_path)]
"""A path, or a model's hub id; ``~`` is the home folder of the user who starts the run."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


OneOrMore = BeforeValidator(_as_list)
"""Validator of a list of texts: a single text stands for a list of one."""

NoneOrMore = BeforeValidator(lambda value: [] if value is None else _as_list(value))
"""``OneOrMore``, where null stands for an empty list."""


@functools.cache
def fields_of(schema: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The field of every leaf of a schema by its dotted key, in the schema's order."""
    fields: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            fields[name] = field
        else:
            fields |= {f"{name}.{key}": leaf for key, leaf in fields_of(section).items()}
    return fields


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a section; None for a leaf."""
    # In Python 3.10 list[int] counts as a type, of which issubclass knows nothing.
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def is_free_mapping(annotation: Any) -> bool:
    """Whether a leaf is a mapping whose keys are the user's."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(is_free_mapping(part) for part in get_args(annotation))
    return annotation is dict or get_origin(annotation) is dict


def default_at(schema: type[BaseModel], key: str) -> Any:
    """The default of the leaf ``key``, or of the leaf that holds this entry; None without a default."""
    fields = fields_of(schema)
    while key and key not in fields:
        key = key.rpartition(".")[0]
    return fields[key].default if key and not fields[key].is_required() else None


def is_section(schema: type[BaseModel], key: str) -> bool:
    """Whether ``key`` is a section of the schema."""
    return any(name.startswith(f"{key}.") for name in fields_of(schema))


def has_key(schema: type[BaseModel], key: str) -> bool:
    """Whether ``key`` is a leaf, a section, or anything below a mapping whose keys are the user's."""
    is_leaf = any(
        key == name or (key.startswith(f"{name}.") and is_free_mapping(field.annotation))
        for name, field in fields_of(schema).items()
    )
    return is_leaf or is_section(schema, key)


def required_leaves(schema: type[BaseModel], key: str) -> list[str]:
    """The leaves without a default below the section ``key``; ``key`` itself when there are none."""
    fields = fields_of(schema)
    return [name for name in fields if name.startswith(f"{key}.") and fields[name].is_required()] or [key]


def leaves_of(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf of a tree of mappings; an empty mapping is a leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def value_at(tree: Any, key: str, absent: Any = None) -> Any:
    """The value at a dotted key of a tree of mappings; ``absent`` where it has none."""
    for part in key.split("."):
        tree = tree.get(part, absent) if isinstance(tree, Mapping) else absent
    return tree


def set_value(tree: dict[str, Any], key: str, value: object) -> None:
    """Set the value at a dotted key of a tree; nothing where a section has a wrong type, which validation
    names."""
    *path, leaf = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return
    tree[leaf] = value


def with_value(config: Model, key: str, value: object) -> Model:
    """A copy of a configuration with another value at a dotted key, which is not checked again."""
    name, _, remainder = key.partition(".")
    inner = with_value(getattr(config, name), remainder, value) if remainder else value
    return config.model_copy(update={name: inner})


_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|pwd|passphrase|credentials?|apikey|key|auth|authorization|dsn)$"
    r"|(api|access|secret|private|signing|encryption)_?key|secret|password",
    re.IGNORECASE,
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HIDDEN = "(hidden)"
_OPEN_SECTIONS = {
    "ray_kwargs.ray_init.runtime_env": ",null",
    "actor_rollout_ref.rollout.engine_kwargs": ",null",
    "actor_rollout_ref.rollout.environment.arguments": "",
    "actor_rollout_ref.rollout.environment.choices": "",
    "reward.custom_reward_function.reward_kwargs": "",
}
"""Sections with keys of the user's own, and the value of a secret that neither a saved configuration nor the
environment has: null, or an error (a function of the user's own must not be called without it). The schema's
own keys never hold secrets."""
_NO_SECRETS = ("PWD",)
"""Variables that hold no secret, although their names look like it; PWD is the working folder."""


def public_values(config: StrictModel) -> dict[str, Any]:
    """The resolved configuration as a plain tree without secrets, safe to write or send.

    A text whose key looks like a secret becomes ``${oc.env:<its key>}``, so a run started from the written
    file with ``--config-name`` takes the value from the environment; credentials in a URL become
    ``(hidden)``.
    """
    return without_secrets(config.model_dump(mode="json"), _from_environment)


def without_secrets(
    tree: dict[str, Any], replace: Callable[[str, str], str] = lambda *_: _HIDDEN
) -> dict[str, Any]:
    """Replace each secret of a configuration tree in place by ``replace`` of its section's entry in
    ``_OPEN_SECTIONS`` and of its key; returns the tree."""
    for key, otherwise in _OPEN_SECTIONS.items():
        section = value_at(tree, key)
        if section:
            set_value(tree, key, _masked(section, functools.partial(replace, otherwise)))
    return tree


def override_without_secrets(override: str) -> str:
    """An override without its value where the value may hold a secret: one of the user's own keys whose name
    looks like it, or a mapping of such keys."""
    name, _, value = override.partition("=")
    key = name.lstrip("+~")
    is_open = any(
        f"{section}.".startswith(f"{key}.") or key.startswith(section) for section in _OPEN_SECTIONS
    )
    if not is_open:
        return override
    hides = looks_secret(key) or "{" in value
    return f"{name}={_HIDDEN if hides else _CREDENTIALS_IN_URL.sub(_HIDDEN, value)}"


def looks_secret(name: str) -> bool:
    """Whether a key or a variable of this name may hold a password or a token."""
    return _SECRET_NAME.search(name) is not None


def secret_variables(variables: Mapping[str, str], named: Sequence[str], key: str) -> list[str]:
    """Names of the environment ``variables`` that may hold secrets, without those ``named`` by the user under
    a ``key`` of the configuration.

    Raises ``ValueError`` when one of these is not set.
    """
    unset = [name for name in named if name not in variables]
    if unset:
        raise ValueError(
            f"{key} must name variables of the environment, but {unset} are not set; export them."
        )
    return [
        name
        for name, value in variables.items()
        if name not in named
        and ((looks_secret(name) and name not in _NO_SECRETS) or _CREDENTIALS_IN_URL.search(value))
    ]


def _from_environment(otherwise: str, name: str) -> str:
    return f"${{oc.env:{name}{otherwise}}}" if _VARIABLE.fullmatch(name) else _HIDDEN


def _masked(value: Any, replace: Callable[[str], str], name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(entry, replace, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_masked(entry, replace, name) for entry in value]
    if not isinstance(value, str):
        return value
    if looks_secret(name):
        return replace(name)
    return _CREDENTIALS_IN_URL.sub(_HIDDEN, value)
