"""verl's files of tools and interactions, with the classes and functions that they name.

The classes need no base class, only the methods that are called; verl is needed only where they import it.
"""

import inspect
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from verl_rc.config.user_code import import_attribute, load_user_module

_REGISTRY = "verl.tools.function_tool"
"""The module of verl in which ``@function_tool`` registers functions."""


class _SchemaModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Property(_SchemaModel):
    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class _Parameters(_SchemaModel):
    type: str = "object"
    properties: dict[str, _Property] = {}
    required: list[str] = []


class _Function(_SchemaModel):
    name: str
    description: str = ""
    parameters: _Parameters = _Parameters()


class ToolSchema(_SchemaModel):
    """A ``tool_schema`` (OpenAI's description of a function), with the attributes and ``model_dump`` of
    verl's class."""

    type: str = "function"
    function: _Function


Call = Callable[[Mapping[str, Any], Mapping[str, Any], Any], Awaitable[tuple[Any, Any]]]
"""Takes the arguments of a call, a row's ``create_kwargs`` and the episode; returns answer and reward."""


@dataclass(frozen=True)
class LoadedTool:
    """A tool of verl's."""

    name: str
    schema: Mapping[str, Any]
    """The tool's schema, for the chat template."""
    call: Call


@cache
def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> Mapping[str, LoadedTool]:
    """The tools of both files by their names, made once in a process.

    Raises ``ValueError`` naming the file when one cannot be made, or two have one name.
    """
    tools = _class_tools(tool_config_path) if tool_config_path else []
    tools += _function_tools(function_tool_path) if function_tool_path else []
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        names = [tool.name for tool in tools]
        raise ValueError(
            f"the tools of {tool_config_path} and {function_tool_path} must have different names, got "
            f"{names}."
        )
    return by_name


@cache
def load_interactions(path: str | None) -> Mapping[str, Any]:
    """The objects that ``interaction_config_path`` names, by their names. Raises ``ValueError`` naming the
    file."""
    if not path:
        return {}
    key = f"interaction_config_path={path}"
    interactions: dict[str, Any] = {}
    for entry in _entries(path, "interaction", key):
        simple_name = entry["class_name"].rpartition(".")[2]
        name = entry.get("name") or simple_name.removesuffix("Interaction").lower()
        if name in interactions:
            raise ValueError(f"{key} must give its interactions different names, got two {name!r}.")
        interactions[name] = _instantiate(key, entry, config={**(entry.get("config") or {}), "name": name})
        _require_methods(interactions[name], ("start_interaction", "generate_response"), key, entry)
    return interactions


def import_class(name: str, key: str) -> Any:
    """The class ``module.Class``. Raises ``ValueError`` naming ``key``."""
    module, _, simple_name = name.rpartition(".")
    return import_attribute(f"{module}:{simple_name}", f"{key}: {name}", "class")


def _explain_missing_verl(error: ValueError, key: str) -> ValueError:
    """``error`` of the import of a user's file, with a remedy where verl is missing."""
    if not re.search(r"No module named '(verl['.])", str(error)):
        return error
    return ValueError(
        f"{key}: what it names imports verl, and this module of verl is not installed here. Install a "
        "release that has it beside this package (pip install --no-deps verl==..., then what `python -c "
        "'import verl'` asks for), or let the classes stand alone: they need no base class, only the methods "
        f"that are called. ({error})"
    )


def _class_tools(path: str) -> list[LoadedTool]:
    key = f"tool_config_path={path}"
    tools = []
    for entry in _entries(path, "tools", key):
        settings = entry.get("config") or {}
        tool_type = settings.get("type", "native")
        if tool_type != "native":
            raise ValueError(
                f"{key}: {entry['class_name']} must have config.type=native, got {tool_type!r}. Other types "
                "are not built: write a class whose execute calls the server."
            )
        schema_entry = entry.get("tool_schema")
        try:
            schema = None if schema_entry is None else ToolSchema.model_validate(schema_entry)
        except ValidationError as error:
            raise ValueError(f"{key}: the tool_schema of {entry['class_name']}: {error}") from error
        tool = _instantiate(key, entry, config=settings, tool_schema=schema)
        _require_methods(tool, ("create", "execute", "release"), key, entry)
        tools.append(_loaded_tool(getattr(tool, "tool_schema", None) or schema, _class_call(tool), key))
    return tools


def _class_call(tool: Any) -> Call:
    """Each call creates an instance, executes it and releases it."""

    async def call(arguments: Mapping[str, Any], create_kwargs: Mapping[str, Any], data: Any) -> Any:
        created = await tool.create(create_kwargs=dict(create_kwargs))
        instance = created[0] if isinstance(created, tuple) else created
        try:
            response, reward, _ = await tool.execute(instance, dict(arguments), agent_data=data)
        finally:
            await tool.release(instance)
        return response, reward

    return call


def _function_tools(path: str) -> list[LoadedTool]:
    key = f"function_tool_path={path}"
    names_before = set(_function_registry())
    try:
        load_user_module(path, key)
    except ValueError as error:
        raise _explain_missing_verl(error, key) from error
    new_tools = [tool for name, tool in _function_registry().items() if name not in names_before]
    if not new_tools:
        raise ValueError(f"{key} must hold functions with verl's decorator @function_tool, and holds none.")
    return [_loaded_tool(tool.tool_schema, _function_call(tool), key) for tool in new_tools]


def _function_registry() -> Mapping[str, Any]:
    return dict(getattr(sys.modules.get(_REGISTRY), "FUNCTION_TOOL_REGISTRY", {}))


def _function_call(tool: Any) -> Call:
    async def call(arguments: Mapping[str, Any], _: Mapping[str, Any], data: Any) -> tuple[Any, Any]:
        returned = await tool.call(dict(arguments))
        response, reward, *_more = (
            (*returned, None, None) if isinstance(returned, tuple) else (returned, None)
        )
        if isinstance(response, dict):
            response = json.dumps(response, ensure_ascii=False)
        return (response if hasattr(response, "text") else str(response)), reward

    return call


def _loaded_tool(schema: Any, call: Call, key: str) -> LoadedTool:
    if schema is None:
        raise ValueError(f"{key}: a tool must have a tool_schema in the file or as an attribute.")
    schema_entry = schema.model_dump(exclude_unset=True, exclude_none=True)
    return LoadedTool(schema.function.name, schema_entry, call)


def _instantiate(key: str, entry: Mapping[str, Any], **arguments: Any) -> Any:
    try:
        tool_class = import_class(entry["class_name"], key)
    except ValueError as error:
        raise _explain_missing_verl(error, key) from error
    try:
        return tool_class(**arguments)
    except Exception as error:
        raise ValueError(
            f"{key}: {entry['class_name']} must be made with {list(arguments)}, but raised {error!r}."
        ) from error


def _require_methods(instance: Any, methods: Sequence[str], key: str, entry: Mapping[str, Any]) -> None:
    missing = [name for name in methods if not inspect.iscoroutinefunction(getattr(instance, name, None))]
    if missing:
        raise ValueError(
            f"{key}: {entry['class_name']} must have the methods (async def) {list(methods)}, lacks "
            f"{missing}."
        )


def read_list(path: str, name: str | None, key: str) -> list[Any]:
    """The list under ``name`` in a YAML file. None if the file is the list. Raises ``ValueError`` naming
    ``key``.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{key} must be a YAML file that can be read: {error}") from error
    entries: Any = tree.get(name) if name and isinstance(tree, dict) else tree
    if not isinstance(entries, list):
        expected = f"a list under {name!r}" if name else "a list"
        raise ValueError(f"{key} must hold {expected}, got {str(entries)[:80]!r}.")
    if "${" in text:
        raise ValueError(f"{key} must hold values as they are: ${{...}} is not resolved; write the value.")
    return entries


def _entries(path: str, name: str, key: str) -> list[Mapping[str, Any]]:
    entries = read_list(path, name, key)
    for entry in entries:
        if not isinstance(entry, dict) or "." not in str(entry.get("class_name")):
            raise ValueError(f"{key}: an entry must have class_name: module.Class, got {str(entry)[:120]!r}.")
    return entries
