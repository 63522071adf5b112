"""Texts of models, exceptions and files as a terminal, a log or a page may show them."""

import sys
import traceback
from types import TracebackType

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
_LINES = [0x2028, 0x2029]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)
_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*_CONTROLS, *_LINES, *_DIRECTIONS, *_SURROGATES)
    if chr(code) not in "\t\n"
}


def printable(text: str) -> str:
    r"""``text`` whose control codes (but tabs and ends of lines), marks of direction and lone surrogates are
    written as Python writes them: ``\x1b``. So nothing in it moves the cursor, hides or reorders letters."""
    return text.translate(_ESCAPES)


def write_error(text: str) -> None:
    """Write ``text`` to standard error."""
    sys.stderr.write(printable(text))


def print_uncaught_exceptions() -> None:
    """Have the traceback of an exception that ends this process written as printable text."""
    sys.excepthook = _write_exception


def _write_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    write_error("".join(traceback.format_exception(kind, error, trace)))
