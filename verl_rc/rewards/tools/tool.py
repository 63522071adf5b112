"""What a tool is: a function of texts that describes itself."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ToolError(ValueError):
    """A call that the tool cannot answer; its message is what the policy reads instead of an answer."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    """For the policy: what it does."""
    parameters: Mapping[str, str]
    """Name and description of each argument; all are texts, and all must be given."""
    function: Callable[..., str]
    """Called with the arguments by name; raises ``ToolError`` for a call that it cannot answer."""

    def schema(self) -> dict[str, Any]:
        """The description that chat templates take as one of their ``tools`` (OpenAI's function format)."""
        properties = {name: {"type": "string", "description": text} for name, text in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer, or what is wrong with the call, as text for the policy."""
        if set(arguments) != set(self.parameters):
            return f"error: {self.name} takes {json.dumps(list(self.parameters))}, got {json.dumps(sorted(arguments))}"
        wrong = [name for name, value in arguments.items() if not isinstance(value, str)]
        if wrong:
            return f"error: arguments must be texts, {wrong[0]} is not"
        try:
            return self.function(**arguments)
        except ToolError as error:
            return f"error: {error}"
