"""Loading the user's own code: functions by ``module:function``, and Python files."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from verl_rc.config.user_files import import_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., object])

_ON_PATH = "(is it on PYTHONPATH?)"


class NamedFunctions(Generic[Function]):
    """A registry of functions of one kind by name. Unregistered names are imported as ``module:function``."""

    def __init__(
        self, kind: str, key: str, aliases: Mapping[str, str] | None = None, remedy: str = ""
    ) -> None:
        """``kind`` in words, the configuration's ``key``, and the ``remedy`` for a function of the user's own
        that reads an input it is not given are for messages; ``aliases``: further names of some functions."""
        self._kind, self._key, self._remedy = kind, key, remedy
        self._functions: dict[str, Function] = {}
        self._aliases = dict(aliases or {})

    def names(self) -> tuple[str, ...]:
        """All names, aliases last."""
        return (*self._functions, *self._aliases)

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator that registers a function as ``name``. Raises ``ValueError`` when the name is taken."""

        def register(function: Function) -> Function:
            if name in self._aliases or self._functions.get(name, function) is not function:
                raise ValueError(f"the {self._kind} {name!r} is registered already; choose another name")
            self._functions[name] = function
            return function

        return register

    def resolve(self, name: str) -> Function:
        """The function called ``name``, or imported as ``module:function``. Raises ``ValueError`` when there
        is none."""
        registered = self._functions.get(self._aliases.get(name, name))
        if registered is not None:
            return registered
        if ":" not in name:
            raise ValueError(
                f"{self._key} must be one of {', '.join(self.names())}, or 'module:function'; got {name!r}"
            )
        function: Function = import_attribute(name, f"the {self._kind} {name!r}", "function")
        return self._naming_absent_inputs(name, function)

    def _naming_absent_inputs(self, name: str, function: Function) -> Function:
        """``function``, whose errors say which inputs it was not given, and which there are."""

        @wraps(function)
        def run(inputs: "DataclassInstance") -> object:
            try:
                return function(inputs)
            except (AttributeError, TypeError) as error:
                if isinstance(error, AttributeError) and error.obj is inputs:
                    names = [name for name in dir(inputs) if not name.startswith("_")]
                    raise ValueError(
                        f"the {self._kind} {name!r} must read what its inputs have: {', '.join(names)}; it "
                        f"reads {error.name!r}"
                    ) from error
                absent = [field.name for field in fields(inputs) if getattr(inputs, field.name) is None]
                if not absent:
                    raise
                raise ValueError(
                    f"the {self._kind} {name!r} must read only what it is given, but it failed with "
                    f"{type(error).__name__}: {error}. This run gives it no {', '.join(absent)}. "
                    f"{self._remedy}"
                ) from error

        return cast("Function", run)


def load_user_module(path: str, key: str) -> ModuleType:
    """The module in the file ``path``, which ``key`` of the configuration names; its code runs.

    Raises ``ValueError`` when there is no such file, or when importing it fails.
    """
    file = Path(path).expanduser()
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{key} must be an existing Python file, got {path!r}.")
    try:
        return import_file(file)
    # A user's module may raise anything, and a script without a main guard calls sys.exit().
    except (Exception, SystemExit) as error:
        hint = f" {_ON_PATH}" if isinstance(error, ImportError) else ""
        raise ValueError(
            f"{key} must be a file that can be imported; {path!r} raised {error!r}{hint}."
        ) from error


def import_attribute(name: str, key: str, noun: str) -> Any:
    """The object that ``module:attribute`` names; ``key`` of the configuration and ``noun`` are for messages.

    Raises ``ValueError`` when the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key} must name a {noun} in an importable module {_ON_PATH}: {error!r}") from error


def load_from_file(path: str, name: str, key: str, noun: str, is_usable: Callable[[object], bool]) -> Any:
    """The ``noun`` in a Python file that ``key.path`` and ``key.name`` of the configuration name. Raises
    ``ValueError`` when the file cannot be imported, or has none of this name that ``is_usable``."""
    module = load_user_module(path, f"{key}.path")
    value = getattr(module, name, None)
    if not is_usable(value):
        usable_names = sorted(name for name, value in vars(module).items() if is_usable(value))
        raise ValueError(f"{key}.name must name a {noun} of {path}, got {name!r}; it has {usable_names}.")
    return value
