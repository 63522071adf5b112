"""The parts that all hooks share: a check of the trainer's version, rows of its tensors, and files whose
writing never disturbs its run."""

import atexit
import importlib.abc
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from itertools import takewhile
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from verl_rc.records.token_records.token_lines import TokenLines

FOLDER_VARIABLE = "VERL_RC_TOKENS"
"""Environment variable with the folder to write to, for hooks that no script names."""
EVERY_VARIABLE = "VERL_RC_TOKENS_EVERY"
"""Environment variable: only each step whose number it divides is recorded; default 1."""
_LOG = logging.getLogger("verl_rc.hooks")


def attaches(
    trainer: str,
    package: str,
    versions: tuple[str, str],
    owner: object,
    parameters: Mapping[str, Sequence[str]],
) -> bool:
    """Whether a hook knows the installed version; a warning says why it does not.

    Args:
        trainer: its name, in words.
        package: distribution whose version counts.
        versions: the first that the hook was read at, and the first that it was not.
        owner: class or module of the functions.
        parameters: by the name of a function the parameters that it must begin with.
    """
    objection = _objection(package, versions, owner, parameters)
    if objection:
        _LOG.warning("verl_rc records no tokens of %s: %s.", trainer, objection)
    return not objection


def _objection(
    package: str, versions: tuple[str, str], owner: object, parameters: Mapping[str, Sequence[str]]
) -> str:
    first, end = versions
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
    if not _numbers(first) <= _numbers(installed) < _numbers(end):
        return f"its hook knows {package} from {first} to below {end}, and {installed} is installed"
    for name, expected in parameters.items():
        function = getattr(owner, name, None)
        taken = [] if function is None else list(inspect.signature(function).parameters)
        if taken[: len(expected)] != list(expected):
            takes = f"it takes ({', '.join(taken)})" if taken else "there is none"
            return f"{name} must take ({', '.join(expected)}, …), and in {package} {installed} {takes}"
    return ""


def _numbers(version: str) -> list[int]:
    """``1.16.0.dev3`` is [1, 16, 0]."""
    parts = takewhile(str.isdecimal, re.split(r"[.+-]|(?<=\d)(?=[a-z])", version))
    return [int(part) for part in parts]


def when_imported(module: str, attach: Callable[[ModuleType], None]) -> None:
    """Call ``attach`` with a module as soon as it is imported: importing it here would be too early."""
    if module in sys.modules:
        attach(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Import(module, attach))


class _Import(importlib.abc.MetaPathFinder):
    """Waits for the import of one module."""

    def __init__(self, module: str, attach: Callable[[ModuleType], None]) -> None:
        self._module, self._attach = module, attach

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            stock = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                stock(module)
                self._attach(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Recorder:
    """Token records of one process of a run, a file a step; a step that did not end has none.

    As a context manager it swallows errors of the recording inside: the first error ends the recording with a
    warning, and the run goes on.
    """

    def __init__(self, folder: str | Path, trainer: str, rank: int = 0, **facts: Any) -> None:
        self.is_on = True
        self.facts = facts
        self._folder, self._trainer, self._rank = Path(folder), trainer, rank
        self._lines: TokenLines | None = None
        self.step: int | None = None
        """The step whose file is open."""
        interval = os.environ.get(EVERY_VARIABLE, "1")
        with self:
            if not interval.isdecimal() or not int(interval):
                raise ValueError(f"{EVERY_VARIABLE} must be a whole number above 0, got {interval!r}")
            self._interval = int(interval)
        atexit.register(self.close, is_whole=False)  # Ctrl-C in the middle of a step

    def takes(self, step: int) -> bool:
        """Whether rows of a step are recorded."""
        return self.is_on and step % self._interval == 0

    def write(self, step: int, rows: Iterator[dict[str, Any]]) -> None:
        """Add rows to the file of a step. The first rows of a step complete the file of the step before."""
        if step != self.step:
            self.close()
            name = f"step_{step:06d}.rank_{self._rank}.jsonl"
            self._lines, self.step = TokenLines(self._folder / name, self._trainer, **self.facts), step
        for row in rows:
            if self._lines is not None:
                self._lines.write(step, **row)

    def close(self, is_whole: bool = True) -> None:
        """Complete the file of the newest step, or remove it where it is not ``is_whole``."""
        lines, self._lines, self.step = self._lines, None, None
        if lines is not None:
            with self:
                lines.close(keep=is_whole and self.is_on)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.is_on:
            self.is_on = False
            reason = f"{type(error).__name__} {' '.join(str(error).split())}"[:200]
            _LOG.warning("verl_rc stops recording tokens, the run goes on: %s.", reason)
            self.close()
        return True


def rows_of(keep: Any, tokens: Mapping[str, Any], **columns: Any) -> Iterator[dict[str, Any]]:
    """Rows as ``TokenLines.write`` takes them, without those that have no token.

    Args:
        keep: ``[B, R]``, 1 where a row has a token behind its prompt.
        tokens: by field, ``[B, R]``; None is left out.
        columns: by field, one value a row; None is left out.
    """
    places = _on_host(keep).bool()
    cut = {name: _on_host(values) for name, values in tokens.items() if values is not None}
    single = {name: _on_host(values) for name, values in columns.items() if values is not None}
    for index, place in enumerate(places):
        if place.any():
            yield {name: values[index][place] for name, values in cut.items()} | {
                name: values[index] for name, values in single.items()
            }


def masked_rows(values: Any, keep: Any) -> list[Any]:
    """The values that ``keep`` ``[B, T]`` marks, of each row of ``values`` ``[B, T]``."""
    return [row[place] for row, place in zip(_on_host(values), _on_host(keep).bool(), strict=True)]


def _on_host(values: Any) -> Any:
    return values.detach().cpu() if hasattr(values, "detach") else values
