"""Keeping passwords and tokens out of everything a run writes down."""

import re
from collections.abc import Mapping
from typing import Any

from verl_rc.config.base import StrictModel

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|pwd|passphrase|credentials?|apikey|key|auth|authorization|dsn)$"
    r"|(api|access|secret|private|signing|encryption)_?key|secret|password",
    re.IGNORECASE,
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HIDDEN = "(hidden)"
_OPEN_SECTIONS = (("ray_kwargs", "ray_init", "runtime_env"), ("actor_rollout_ref", "rollout", "engine_kwargs"))
"""Where users put entries of their own; the schema's own keys hold no secrets, whatever they are called."""


def public_values(config: StrictModel) -> dict[str, Any]:
    """The resolved configuration as a plain tree, fit to be written down or sent away.

    A text whose key looks like a secret's becomes ``${oc.env:<its key>,null}``: given back with ``--config-name``, such a file
    takes the value from the environment. Credentials in a URL become ``(hidden)``.
    """
    tree = config.model_dump(mode="json")
    for path in _OPEN_SECTIONS:
        parent: Any = tree
        for name in path[:-1]:
            parent = parent.get(name) or {}
        if parent.get(path[-1]):
            parent[path[-1]] = _masked(parent[path[-1]])
    return tree


def looks_secret(name: str) -> bool:
    """Whether a key or a variable of this name may hold a password or a token."""
    return _SECRET_NAME.search(name) is not None


def _masked(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_masked(entry, name) for entry in value]
    if not isinstance(value, str):
        return value
    if looks_secret(name):
        return f"${{oc.env:{name},null}}" if _VARIABLE.fullmatch(name) else _HIDDEN
    return _CREDENTIALS_IN_URL.sub(_HIDDEN, value)
