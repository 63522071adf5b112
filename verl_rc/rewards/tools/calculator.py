"""Arithmetic for a policy: an expression is parsed, and only numbers and operators are carried out."""

import ast
import math
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction

from verl_rc.rewards.tools.tool import Tool, ToolError

MAX_CHARACTERS = 200
"""Longest expression. It bounds depth and number of operations, hence the time."""
MAX_BITS = 256
"""Largest size of a numerator or denominator, of results between and at the end."""
MAX_EXPONENT = 64
"""Largest exponent of a power: what it leads to has at most ``MAX_BITS * MAX_EXPONENT`` bits before it is refused."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate_expression(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * / // % **`` and parentheses; Python's rules of precedence.

    The arithmetic is exact, on fractions of the numbers as written (up to 17 digits): ``0.1+0.2`` is ``0.3``. A value that is
    no whole number is written as a decimal, rounded to 10 significant digits. Nothing is ever executed: the syntax tree is
    walked, and anything but numbers and these operators is refused. Work is bounded by the length of the expression and the
    size of its numbers.

    Raises ``ToolError`` for what is no such expression, has no value, or is too large.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS:
        raise ToolError(f"at most {MAX_CHARACTERS} characters, got {len(text)}")
    if not text or not text.isascii():
        raise ToolError("not an arithmetic expression")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the expression's style
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("not an arithmetic expression") from None
    return _written(_value(tree.body))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes()):
            raise ToolError("not an arithmetic expression")
        case ast.Constant(value=int() | float() as number):
            return _bounded(_exact(node, number))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            first, second = _value(left), _value(right)
            if second == 0 and isinstance(operation, ast.Div | ast.FloorDiv | ast.Mod):
                raise ToolError("division by zero")
            return _bounded(Fraction(_BINARY[type(operation)](first, second)))
        case _:
            raise ToolError("not an arithmetic expression")


def _exact(node: ast.Constant, number: int | float) -> Fraction:
    """A literal as it was written: 0.1 is one tenth, not the nearest binary fraction."""
    if isinstance(number, int):
        return Fraction(number)
    if not math.isfinite(number) or abs(number) > 2.0**MAX_BITS or 0 < abs(number) < 2.0**-MAX_BITS:
        raise ToolError("a number is too large")
    return Fraction(repr(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("a number is too large")
    return value


def _written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


CALCULATOR = Tool(
    name="calculator",
    description="Evaluates an arithmetic expression of numbers, + - * / // % ** and parentheses.",
    parameters={"expression": "The expression, e.g. (12+3)*4"},
    function=evaluate_expression,
)
"""``multi_turn.tools=[calculator]``."""
