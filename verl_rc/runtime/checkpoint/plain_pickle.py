"""A pickle is read here without unpickling: plain values are made, and nothing that it names is looked up.

``pickle`` makes what a file names and sets the attributes that it gives, also those of a class. A list of
allowed names does not keep that apart from running code; so this reader knows the few instructions that torch
writes, and hands every call of a name to its caller.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class RefusedPickleError(ValueError):
    """A pickle holds what none of this project's files needs; the message says what."""


@dataclass(frozen=True)
class Name:
    """A class, function or constant that a pickle names."""

    text: str
    """``module.name``."""


@dataclass(eq=False)
class Call:
    """A call that a pickle asks for; it is not made."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    """The state that the result would be given afterwards."""


def read_pickle(
    data: bytes,
    names: Callable[[str], bool],
    call: Callable[[str, tuple[Any, ...]], Any] = Call,
    stored: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of a pickle: None, numbers, text, lists, tuples and dicts, and the results of ``call`` and
    ``stored``.

    Args:
        data: The pickle.
        names: Whether a name is one of those that the file may name; only strings and numbers are keys of
            dicts, beside these.
        call: Returns what stands for a call of a name with arguments.
        stored: Returns what stands for a persistent id. None if the file may have none.

    Raises:
        RefusedPickleError: the pickle holds anything else, or is damaged.
    """
    reader = _Reader(names, call, stored)
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name not in _INSTRUCTIONS:
                raise RefusedPickleError(
                    f"it has the instruction {code.name}, which torch does not write; do not trust it"
                )
            _INSTRUCTIONS[code.name](reader, argument)
        (value,) = reader.stack
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, RefusedPickleError):
            raise
        raise RefusedPickleError(f"it is a damaged pickle ({type(error).__name__})") from error
    return value


class _Reader:
    """The stack and the memo that instructions of a pickle work on."""

    def __init__(
        self,
        names: Callable[[str], bool],
        call: Callable[[str, tuple[Any, ...]], Any],
        stored: Callable[[Any], Any] | None,
    ) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._names, self._call, self._stored = names, call, stored

    def pop(self, count: int) -> list[Any]:
        """The last values, which are removed."""
        low = len(self.stack) - count
        _require(low >= 0, "its stack is too short")
        items = self.stack[low:]
        del self.stack[low:]
        return items

    def pop_to_mark(self) -> list[Any]:
        """The values behind the last mark, which are removed with it."""
        return self.pop(len(self.stack) - self.marks.pop())

    def put(self, key: int | None) -> None:
        """Keep the last value."""
        self.memo[len(self.memo) if key is None else key] = self.stack[-1]

    def name(self, argument: str | None) -> None:
        """Name a class, function or constant."""
        module, name = self.pop(2) if argument is None else argument.split(" ", 1)
        full = f"{module}.{name}"
        if type(module) is not str or type(name) is not str or not self._names(full):
            raise RefusedPickleError(f"it names {full[:200]!r}, which no checkpoint needs; do not trust it")
        self.stack.append(Name(full))

    def call(self) -> None:
        """Call a name."""
        function, arguments = self.pop(2)
        _require(type(function) is Name and type(arguments) is tuple, "it calls what is no name")
        self.stack.append(self._call(function.text, arguments))

    def build(self) -> None:
        """Give the result of a call a state."""
        (state,) = self.pop(1)
        target = self.stack[-1]
        _require(type(target) is Call and target.state is None, "it sets attributes of what it did not make")
        target.state = state

    def load(self) -> None:
        """Take what is stored beside the pickle."""
        if self._stored is None:
            raise RefusedPickleError("it refers to what is stored elsewhere; do not trust it")
        self.stack.append(self._stored(*self.pop(1)))

    def extend(self, items: list[Any]) -> None:
        """Append to a list."""
        _require(type(self.stack[-1]) is list, "it appends to what is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Set items of a dict."""
        _require(type(self.stack[-1]) is dict and len(items) % 2 == 0, "it sets items of what is no dict")
        _require(all(type(key) in (str, int, Call) for key in items[::2]), "a key is no text and no number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RefusedPickleError(f"{otherwise}; do not trust it")


_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
_INSTRUCTIONS: Mapping[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(_LITERALS, lambda reader, value: reader.stack.append(value)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, key: reader.stack.append(reader.memo[key])),
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Reader.name),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda reader, _: reader.call()),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda reader, _: None),
    "MARK": lambda reader, _: reader.marks.append(len(reader.stack)),
    "NONE": lambda reader, _: reader.stack.append(None),
    "NEWTRUE": lambda reader, _: reader.stack.append(True),
    "NEWFALSE": lambda reader, _: reader.stack.append(False),
    "EMPTY_DICT": lambda reader, _: reader.stack.append({}),
    "EMPTY_LIST": lambda reader, _: reader.stack.append([]),
    "EMPTY_TUPLE": lambda reader, _: reader.stack.append(()),
    "TUPLE": lambda reader, _: reader.stack.append(tuple(reader.pop_to_mark())),
    "TUPLE1": lambda reader, _: reader.stack.append(tuple(reader.pop(1))),
    "TUPLE2": lambda reader, _: reader.stack.append(tuple(reader.pop(2))),
    "TUPLE3": lambda reader, _: reader.stack.append(tuple(reader.pop(3))),
    "APPEND": lambda reader, _: reader.extend(reader.pop(1)),
    "APPENDS": lambda reader, _: reader.extend(reader.pop_to_mark()),
    "SETITEM": lambda reader, _: reader.set_items(reader.pop(2)),
    "SETITEMS": lambda reader, _: reader.set_items(reader.pop_to_mark()),
    "BUILD": lambda reader, _: reader.build(),
    "BINPERSID": lambda reader, _: reader.load(),
}
"""The instructions of pickle that torch writes."""
