"""Where token records come from: files of this project or of another trainer, by step, not yet read."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from verl_rc.config.files import RefusedFileError, is_outside
from verl_rc.data.token_record import (
    FOLDER,
    PIECES,
    VERSION_FACT,
    DamagedRecordError,
    TokenRecord,
    required_facts,
)
from verl_rc.data.token_rows import Row, parse_line, record_of_rows, records_by_step
from verl_rc.insight.run_folder.lines import first_few, lines_of, open_text

OWN_TRAINER = "verl_rc"
"""``trainer`` in the facts of this project's own records."""
UNKNOWN_TRAINER = "an unknown trainer"
"""Where the facts name none, as in records of versions of verl_rc before the format was numbered."""
MOST_BYTES = 512 << 20
"""Of token files that are read; of more, every so many steps and lines are."""
_MOST_NAMED = 3
_OWN = r"(?:^|/)step_(\d{6,})(?:\.rank_\d+)?\.(?:parquet|jsonl)$"

Files = Mapping[int, Sequence[Path]]
"""Files of each step, steps ascending."""


@dataclass(frozen=True)
class TokenSource:
    """The records of a path."""

    trainer: str
    """Who wrote them, in words."""
    steps: Sequence[int]
    read: Callable[[int], TokenRecord]
    """Raises ``DamagedRecordError``."""
    notes: list[str] = field(default_factory=list)
    """Sentences about records that were left out and facts that are unknown; grows while records are read."""
    pieces: Path | None = None
    """The file with the text of every token id."""
    folder: Path | None = None
    """The folder that all files lie in; None: the user has named a file."""

    @classmethod
    def from_records(cls, trainer: str, records: Iterable[TokenRecord], notes: list[str]) -> "TokenSource":
        """Of records that are already read, steps ascending."""
        by_step = {record.step: record for record in records}
        return cls(trainer, list(by_step), by_step.__getitem__, notes)

    def records(self, first_step: int = 0, last_step: int = 1 << 62) -> Iterator[TokenRecord]:
        """The readable records, steps ascending; the notes name the others."""
        damaged, lacking = [], Counter[str]()
        for step in self.steps:
            if first_step <= step <= last_step:
                try:
                    record = self.read(step)
                except DamagedRecordError as error:
                    damaged.append(f"step {step} ({error})")
                else:
                    lacking.update(record.left_out)
                    yield record
        for name, count in lacking.items():
            self.notes.append(f"{name} is left out of {count} step(s): some of their rows lack it.")
        if damaged:
            names = first_few(damaged, _MOST_NAMED, "; ")
            self.notes.append(f"{len(damaged)} token record(s) cannot be read and are left out: {names}.")


@dataclass(frozen=True)
class Layout:
    """How another trainer writes tokens."""

    trainer: str
    globs: Sequence[str]
    """Where token files lie below a folder."""
    number: str
    """Regular expression for the path of a token file, with the file's step as its group."""
    rows: Callable[[int, Path, list[str]], Iterable[Row]]
    """Rows of one file of a step; the list takes notes."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What holds for every run of it."""
    lacks: Sequence[str] = ()
    """What its files do not hold, and which of its options would record it; one sentence each."""
    holds_many_steps: bool = False
    """Whether a file is a shard of rows of any steps, and its number no step."""
    identity: str = ""
    """Field of a row whose value tells that several files of the step have it; None: no other has."""

    def files(self, folder: Path) -> Files:
        """Token files of this trainer by step, ascending."""
        paths = sorted(path for pattern in self.globs for path in folder.glob(pattern))
        return _files_by_step(paths, self.number)

    def source(self, path: Path) -> TokenSource | None:
        """The records at a path; None where there are none of this trainer."""
        files = self.files(path)
        if not files:
            return None
        notes = [f"Token files of {self.trainer} at {len(files):,} steps.", *self.lacks]
        files = files_to_read(files, notes)
        facts = {"trainer": self.trainer, **self.facts}
        if self.holds_many_steps:
            shards = (file for paths in files.values() for file in paths)
            rows = (row for file in shards for row in self.rows(0, file, notes))
            return TokenSource.from_records(self.trainer, records_by_step(facts, rows), notes)

        def read(step: int) -> TokenRecord:
            errors = (LookupError, TypeError, ValueError, AttributeError)
            with refused_as(f"its fields are not those of {self.trainer}", *errors):
                rows = [row for file in files[step] for row in self.rows(step, file, notes)]
            identified = {row[self.identity]: row for row in rows if row.get(self.identity) is not None}
            unidentified = [row for row in rows if row.get(self.identity) is None]
            return record_of_rows(facts, step, [*identified.values(), *unidentified])

        return TokenSource(self.trainer, list(files), read, notes)


@contextmanager
def refused_as(sentence: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise ``DamagedRecordError`` with ``sentence`` where one of ``errors`` is raised inside."""
    try:
        yield
    except DamagedRecordError:
        raise
    except errors as error:
        reason = f"{type(error).__name__} {' '.join(str(error).split())}"[:160]
        raise DamagedRecordError(f"{sentence}: {reason}") from error


def read_lines(path: Path, notes: list[str], folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; of a file that is too long, every so many lines. Each note is
    added once.

    ``folder``: as ``open_inside`` takes it. A file that leaves it is noted and left out.
    """
    try:
        text = open_text(path, folder)
    except RefusedFileError as error:
        notes.append(f"{path.name} is left out: {error.strerror}.")
        return
    size, broken = os.fstat(text.fileno()).st_size, list[str]()
    stride = max(1, math.ceil(size / MOST_BYTES))
    sentences = [f"{path.name} has {_size(size)}: every {stride}th line was read."] * (stride > 1)
    with text as file:
        for number, line in islice(enumerate(lines_of(file), start=1), 0, None, stride):
            row = parse_line(line)
            if row is not None:
                yield row
            elif line.strip():
                broken.append(str(number))
    if broken:
        numbers = first_few(broken, _MOST_NAMED)
        sentences.append(
            f"{path.name}: {len(broken)} line(s) are half written or no rows, and left out: {numbers}."
        )
    notes.extend(sentence for sentence in sentences if sentence not in notes)


def _files_by_step(paths: Iterable[Path], number: str) -> Files:
    """The files whose path has the step that ``number`` finds, in the order of ``paths`` within a step."""
    files: dict[int, list[Path]] = {}
    for path in paths:
        if match := re.search(number, path.as_posix()):
            files.setdefault(int(match[1]), []).append(path)
    return {step: files[step] for step in sorted(files)}


def _rank_notes(files: Files) -> list[str]:
    """Which steps lack the file of a rank; where files are not of ranks, none."""
    ranks = {step: {path.name.partition(".rank_")[2] for path in paths} for step, paths in files.items()}
    all_ranks = set[str]().union(*ranks.values())
    lacking = [str(step) for step, ranks_of_step in ranks.items() if ranks_of_step != all_ranks]
    if not lacking:
        return []
    steps = first_few(lacking, _MOST_NAMED)
    return [f"{len(lacking)} step(s) lack the token file of a rank that other steps have: {steps}."]


def files_to_read(files: Files, notes: list[str]) -> Files:
    """Every so many steps where all files together are too large, the first and the last among them."""
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    stride = math.ceil(size / MOST_BYTES)
    if stride <= 1 or len(files) < 2:
        return files
    steps = list(files)
    selection = [*steps[:-1:stride], steps[-1]]
    notes.append(f"The token files have {_size(size)}: {len(selection):,} of {len(steps):,} steps were read.")
    return {step: files[step] for step in selection}


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def own_source(path: Path) -> TokenSource | None:
    """Token records of version 1, as this project and the hooks write them: a file, or a folder of files.

    Raises:
        DamagedRecordError: the path is a single file of JSON lines that is none.
    """
    if path.is_file():
        has_facts = path.suffix == ".parquet" or VERSION_FACT in (_first_line(path, None) or {})
        try:
            return _single_file(path) if has_facts else None
        except DamagedRecordError as error:
            raise DamagedRecordError(f"{path} must be a token record, but {error}") from error
    folders = (path, path / FOLDER)
    found = [file for folder in folders for file in sorted(folder.glob("step_*")) if file.is_file()]
    inside = [file for file in found if not is_outside(path, file)]
    files = _files_by_step(inside, _OWN)
    if not files:
        return None
    notes = _rank_notes(files)
    if left_out := len(found) - len(inside):
        notes.append(f"{left_out} token file(s) are links that leave {path.name}, and are left out.")
    files = files_to_read(files, notes)
    first_file = next(iter(files.values()))[0]
    trainer = str((_facts_or_none(first_file, path) or {}).get("trainer", UNKNOWN_TRAINER))

    def read(step: int) -> TokenRecord:
        if files[step][0].suffix == ".parquet":
            return _parquet(files[step][0], path)
        lines = [line for file in files[step] for line in read_lines(file, notes, path)]
        facts = required_facts(next((line for line in lines if VERSION_FACT in line), None))
        return record_of_rows(facts, step, [line for line in lines if VERSION_FACT not in line])

    return TokenSource(trainer, list(files), read, notes, path / FOLDER / PIECES, path)


def _single_file(path: Path) -> TokenSource:
    notes: list[str] = []
    if path.suffix == ".parquet":
        record = _parquet(path, None)
        return TokenSource.from_records(str(record.facts.get("trainer", "")), [record], notes)
    lines = read_lines(path, notes)
    facts = required_facts(next(lines, None))
    return TokenSource.from_records(str(facts.get("trainer", "")), records_by_step(facts, lines), notes)


def _facts_or_none(path: Path, folder: Path) -> dict[str, Any] | None:
    """The facts of a file in a folder; None where it has none that can be read."""
    try:
        if path.suffix == ".parquet":
            from verl_rc.data.token_parquet import read_facts  # noqa: PLC0415  (pyarrow)

            return read_facts(path, folder)
        return required_facts(_first_line(path, folder))
    except (DamagedRecordError, RefusedFileError):
        return None


def _first_line(path: Path, folder: Path | None) -> dict[str, Any] | None:
    with open_text(path, folder) as file:
        return parse_line(file.readline(1 << 20))


def _parquet(path: Path, folder: Path | None) -> TokenRecord:
    from verl_rc.data.token_parquet import read_record  # noqa: PLC0415  (pyarrow, without which JSON lines are read)

    return read_record(path, folder)
