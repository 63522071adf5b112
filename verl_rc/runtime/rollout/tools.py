"""Tools that a policy may call between its turns: text in, text out, bounded in time."""

import ast
import inspect
import json
import math
import operator
import queue
import reprlib
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from verl_rc.config.errors import nearest_key
from verl_rc.config.user_code import import_attribute
from verl_rc.printable import write_error
from verl_rc.runtime.rollout.environment import EpisodeFailedError


class ToolError(ValueError):
    """A call that the tool cannot answer; the policy reads the message instead of an answer."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    """A description of the function, for the policy to read."""
    parameters: Mapping[str, str]
    """Name and description of each argument; all are required texts."""
    function: Callable[..., str]
    """Takes the arguments by name; raises ``ToolError`` for a call that it cannot answer."""

    def schema(self) -> dict[str, Any]:
        """The description that chat templates take as one of their ``tools`` (OpenAI's function format)."""
        properties = {name: {"type": "string", "description": text} for name, text in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer, or the error message of a wrong call, for the policy."""
        if set(arguments) != set(self.parameters):
            return (
                f"error: {self.name} takes {json.dumps(list(self.parameters))}, got "
                f"{json.dumps(sorted(arguments))}"
            )
        non_texts = [name for name, value in arguments.items() if not isinstance(value, str)]
        if non_texts:
            return f"error: arguments must be texts, {non_texts[0]} is not"
        try:
            return self.function(**arguments)
        except ToolError as error:
            return f"error: {error}"


MAX_CHARACTERS = 200
"""Longest expression, which limits depth, number of operations and time."""
MAX_BITS = 256
"""Largest numerator or denominator of every result, bits."""
MAX_EXPONENT = 64
"""Largest exponent of a power: its result has at most ``MAX_BITS * MAX_EXPONENT`` bits before it is
refused."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate_expression(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * / // % **`` and parentheses; Python's rules of
    precedence.

    The arithmetic is exact, on fractions of the numbers as written (up to 17 digits): ``0.1+0.2`` is ``0.3``.
    A value that is not an integer is written as a decimal, rounded to 10 significant digits. No code is
    executed: the syntax tree is walked, and anything but numbers and these operators is refused. Work is
    bounded by the length of the expression and the size of its numbers.

    Raises ``ToolError`` for text that is no such expression, has no value, or is too large.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS:
        raise ToolError(f"at most {MAX_CHARACTERS} characters, got {len(text)}")
    if not text or not text.isascii():
        raise ToolError("not an arithmetic expression")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the expression's style
            tree = ast.parse(text, mode="eval")
    # CPython's parser raises MemoryError, too, when nesting is too deep.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("not an arithmetic expression") from None
    value = _evaluate(tree.body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        # bool first: it is a subclass of int, so True would be 1.
        case ast.Constant(value=bool() | complex() | str() | bytes()):
            raise ToolError("not an arithmetic expression")
        case ast.Constant(value=int() | float() as number):
            return _check_size(_to_fraction(node, number))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_evaluate(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _check_size(_power(_evaluate(left), _evaluate(right)))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            first, second = _evaluate(left), _evaluate(right)
            if second == 0 and isinstance(operation, ast.Div | ast.FloorDiv | ast.Mod):
                raise ToolError("division by zero")
            return _check_size(Fraction(_BINARY[type(operation)](first, second)))
        case _:
            raise ToolError("not an arithmetic expression")


def _to_fraction(node: ast.Constant, number: int | float) -> Fraction:
    """The exact value of a literal: 0.1 is one tenth, not the nearest binary fraction."""
    if isinstance(number, int):
        return Fraction(number)
    if not math.isfinite(number) or abs(number) > 2.0**MAX_BITS or 0 < abs(number) < 2.0**-MAX_BITS:
        raise ToolError("a number is too large")
    # repr is the shortest decimal that reads back as the same float; Fraction(0.1) is not 1/10.
    return Fraction(repr(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    # The exponent is bounded before the power is computed: 9**9**9 would never end.
    return Fraction(base ** int(exponent))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("a number is too large")
    return value


CALCULATOR = Tool(
    name="calculator",
    description="Evaluates an arithmetic expression of numbers, + - * / // % ** and parentheses.",
    parameters={"expression": "The expression, e.g. (12+3)*4"},
    function=evaluate_expression,
)
"""``multi_turn.tools=[calculator]``."""


_KEY = "actor_rollout_ref.rollout.multi_turn"


class ToolFailedError(EpisodeFailedError):
    """A tool has failed; the message names the tool and the call."""


def call_tool(tool: Tool, arguments: Mapping[str, Any], timeout_seconds: float) -> str:
    """The tool's answer, as text for the policy. The tool runs in a thread of its own.

    Raises ``ToolFailedError`` when the tool raises anything but ``ToolError``, gives no text, or is late.
    """
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(tool.call(arguments))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            answers.put(error)
            write_error(traceback.format_exc())
            raise SystemExit from None  # of this thread, whose traceback is written

    # Python cannot stop a thread: a hanging daemon thread does not keep the process alive.
    threading.Thread(target=run, name="tools", daemon=True).start()
    subject = f"the tool {tool.name!r} of {_KEY}.tools, called with {reprlib.repr(dict(arguments))},"
    try:
        answer = answers.get(timeout=timeout_seconds)
    except queue.Empty:
        raise ToolFailedError(
            f"{subject} must answer within {_KEY}.tool_timeout_seconds={timeout_seconds:g}, and is still at "
            "work. Give it a limit of its own that ends in a ToolError, or raise this one."
        ) from None
    if isinstance(answer, BaseException):
        raise ToolFailedError(
            f"{subject} raised {answer!r}. A tool must raise {ToolError.__module__}.ToolError for a call "
            "that it cannot answer; its text is then the answer."
        ) from answer
    if not isinstance(answer, str):
        raise ToolFailedError(f"{subject} must return a text, got {reprlib.repr(answer)}.")
    return answer


BUILT_IN = {CALCULATOR.name: CALCULATOR}
"""Tools that are part of this package."""


def find_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools called ``names``, built in or ``module:attribute`` of the user's own, by the name they have.

    Raises ``ValueError`` when there is no such tool, or two have one name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        key = f"{_KEY}.tools={name}"
        tool = import_attribute(name, key, "tool") if ":" in name else BUILT_IN.get(name)
        if tool is None:
            raise ValueError(
                f"actor_rollout_ref.rollout.multi_turn.tools must name tools among {sorted(BUILT_IN)} or "
                f"module:attribute, got {name!r}; the nearest is {nearest_key(name, list(BUILT_IN))}."
            )
        if not isinstance(tool, Tool):
            raise ValueError(f"{key} must be a verl_rc.runtime.rollout.tools.Tool, got {tool!r}.")
        if inspect.iscoroutinefunction(tool.function):
            raise ValueError(
                f"{key} must have a function that returns its answer, got an `async def`. Write a plain "
                "function, or an environment (docs/tasks.md#environments), whose methods may wait."
            )
        if tool.name in tools:
            raise ValueError(
                "actor_rollout_ref.rollout.multi_turn.tools must have different names, got two "
                f"{tool.name!r}."
            )
        tools[tool.name] = tool
    return tools
