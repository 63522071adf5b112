"""Removing passwords and tokens from everything that a run writes."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_rc.config.schema import StrictModel

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|pwd|passphrase|credentials?|apikey|key|auth|authorization|dsn)$"
    r"|(api|access|secret|private|signing|encryption)_?key|secret|password",
    re.IGNORECASE,
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HIDDEN = "(hidden)"
_OPEN_SECTIONS = (("ray_kwargs", "ray_init", "runtime_env"), ("actor_rollout_ref", "rollout", "engine_kwargs"))
"""Sections with keys of the user's own; the schema's own keys never hold secrets."""


def public_values(config: StrictModel) -> dict[str, Any]:
    """The resolved configuration as a plain tree without secrets, safe to write or send.

    A text whose key looks like a secret becomes ``${oc.env:<its key>,null}``, so a run started from the written file with
    ``--config-name`` takes the value from the environment. Credentials in a URL become ``(hidden)``.
    """
    return without_secrets(config.model_dump(mode="json"), _from_environment)


def without_secrets(tree: dict[str, Any], replace: Callable[[str], str] = lambda _: _HIDDEN) -> dict[str, Any]:
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
    is_open = any(f"{'.'.join(path)}.".startswith(f"{key}.") or key.startswith(".".join(path)) for path in _OPEN_SECTIONS)
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
