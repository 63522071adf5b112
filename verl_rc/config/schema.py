"""``StrictModel``, the base class of all configuration sections, and functions over the tree of sections."""

import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl_rc.config.errors import shortened

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


def followed_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of a schema that follows another key, and that key."""
    for name, field in schema.model_fields.items():
        section, followed = section_of(field.annotation), followed_key(field)
        if section is not None:
            yield from followed_keys(section, f"{prefix}{name}.")
        elif followed is not None:
            yield prefix + name, followed


def _usable_path(text: str) -> str:
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


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted names of all leaves of a schema."""
    for name, field in schema.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from known_keys(section, f"{prefix}{name}.")


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


def defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """The tree of all leaves that have a default."""
    tree: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            tree[name] = defaults(section)
        elif field.default is not PydanticUndefined:
            tree[name] = field.default
    return tree


def default_at(schema: type[BaseModel], path: Sequence[str]) -> Any:
    """The default of the leaf at ``path``, or of the list that holds it; None without a default."""
    section: type[BaseModel] | None = schema
    for part in path:
        field = None if section is None else section.model_fields.get(part)
        if field is None:
            return None
        section = section_of(field.annotation)
        if section is None:
            return None if field.default is PydanticUndefined else field.default
    return None


def has_key(schema: type[BaseModel], key: str) -> bool:
    """Whether ``key`` is a leaf, a section, or anything below a mapping whose keys are the user's."""
    section: type[BaseModel] | None = schema
    for part in key.split("."):
        field = None if section is None else section.model_fields.get(part)
        if field is None:
            return False
        if is_free_mapping(field.annotation):
            return True
        section = section_of(field.annotation)
    return True


def leads_to_leaf(schema: type[BaseModel], key: str) -> bool:
    """Whether ``key`` is not a section of the schema: a leaf, below a leaf, or unknown."""
    section: type[BaseModel] | None = schema
    for part in key.split("."):
        if section is None or part not in section.model_fields:
            return True
        section = section_of(section.model_fields[part].annotation)
    return section is None


def required_leaves(schema: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The leaves without a default at or below ``path``; ``path`` itself when there are none."""
    section: type[BaseModel] | None = schema
    for part in path:
        section = (
            section_of(section.model_fields[part].annotation)
            if section and part in section.model_fields
            else None
        )
    fields = {} if section is None else section.model_fields
    below = [
        leaf
        for name, field in fields.items()
        if field.is_required()
        for leaf in required_leaves(schema, [*path, name])
    ]
    return below or [".".join(path)]


def leaves_of(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf of a tree of mappings; an empty mapping is a leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|pwd|passphrase|credentials?|apikey|key|auth|authorization|dsn)$"
    r"|(api|access|secret|private|signing|encryption)_?key|secret|password",
    re.IGNORECASE,
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HIDDEN = "(hidden)"
_OPEN_SECTIONS = (
    ("ray_kwargs", "ray_init", "runtime_env"),
    ("actor_rollout_ref", "rollout", "engine_kwargs"),
)
"""Sections with keys of the user's own; the schema's own keys never hold secrets."""


def public_values(config: StrictModel) -> dict[str, Any]:
    """The resolved configuration as a plain tree without secrets, safe to write or send.

    A text whose key looks like a secret becomes ``${oc.env:<its key>,null}``, so a run started from the
    written file with ``--config-name`` takes the value from the environment. Credentials in a URL become
    ``(hidden)``.
    """
    return without_secrets(config.model_dump(mode="json"), _from_environment)


def without_secrets(
    tree: dict[str, Any], replace: Callable[[str], str] = lambda _: _HIDDEN
) -> dict[str, Any]:
    """Replace each secret of a configuration tree in place by ``replace`` of its key; returns the tree."""
    for path in _OPEN_SECTIONS:
        parent: Any = tree
        for name in path[:-1]:
            parent = parent.get(name) or {}
        if parent.get(path[-1]):
            parent[path[-1]] = _masked(parent[path[-1]], replace)
    return tree


def override_without_secrets(override: str) -> str:
    """An override without its value where the value may hold a key of the user's own."""
    key = override.lstrip("+~").partition("=")[0]
    is_open = any(
        f"{'.'.join(path)}.".startswith(f"{key}.") or key.startswith(".".join(path))
        for path in _OPEN_SECTIONS
    )
    return f"{override.partition('=')[0]}={_HIDDEN}" if is_open else override


def looks_secret(name: str) -> bool:
    """Whether a key or a variable of this name may hold a password or a token."""
    return _SECRET_NAME.search(name) is not None


def _from_environment(name: str) -> str:
    return f"${{oc.env:{name},null}}" if _VARIABLE.fullmatch(name) else _HIDDEN


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
