"""The files of token records, of version 1, by step, not yet read."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from verl_rc.config.files import RefusedFileError, is_outside
from verl_rc.insight.run_folder.lines import first_few, lines_of, open_text
from verl_rc.records.token_records.token_record import (
    FOLDER,
    PIECES,
    VERSION_FACT,
    DamagedRecordError,
    TokenRecord,
    required_facts,
)
from verl_rc.records.token_records.token_rows import parse_line, record_of_rows, records_by_step

OWN_TRAINER = "verl_rc"
"""``trainer`` in the facts of this project's own records."""
MOST_BYTES = 512 << 20
"""The most bytes of token files that are read. Of larger ones steps and lines are skipped at equal
distances."""
_MOST_NAMED = 3
_NAME = re.compile(r"step_(\d{6,})(?:\.rank_\d+)?\.(?:parquet|jsonl)")

Files = Mapping[int, Sequence[Path]]
"""Files of each step, steps ascending."""


@dataclass(frozen=True)
class TokenSource:
    """The records of a path."""

    trainer: str
    """Who wrote them, in words; empty where the facts do not say it."""
    steps: Sequence[int]
    read: Callable[[int], TokenRecord]
    """Raises ``DamagedRecordError``."""
    notes: list[str] = field(default_factory=list)
    """Sentences about records that were left out and facts that are unknown; grows while records are read."""
    pieces: Path | None = None
    """The file with the text of every token id."""
    folder: Path | None = None
    """The folder that all files lie in. None if the user has named a file."""

    @classmethod
    def from_records(cls, trainer: str, records: Iterable[TokenRecord], notes: list[str]) -> "TokenSource":
        """The files of records that are already read, steps ascending."""
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


def _files_by_step(paths: Iterable[Path]) -> Files:
    """The files that are named as token records, in the order of ``paths`` within a step."""
    files: dict[int, list[Path]] = {}
    for path in paths:
        if match := _NAME.fullmatch(path.name):
            files.setdefault(int(match[1]), []).append(path)
    return {step: files[step] for step in sorted(files)}


def _rank_notes(files: Files) -> list[str]:
    """Notes on steps that lack the file of a rank; none where files are not of ranks."""
    ranks = {step: {path.name.partition(".rank_")[2] for path in paths} for step, paths in files.items()}
    all_ranks = set[str]().union(*ranks.values())
    lacking = [str(step) for step, ranks_of_step in ranks.items() if ranks_of_step != all_ranks]
    if not lacking:
        return []
    steps = first_few(lacking, _MOST_NAMED)
    return [f"{len(lacking)} step(s) lack the token file of a rank that other steps have: {steps}."]


def _files_to_read(files: Files, notes: list[str]) -> Files:
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


def token_source(path: Path) -> TokenSource | None:
    """Token records of version 1: a file, or a folder of files; None where there are none.

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
    files = _files_by_step(inside)
    if not files:
        return None
    notes = _rank_notes(files)
    if left_out := len(found) - len(inside):
        notes.append(f"{left_out} token file(s) are links that leave {path.name}, and are left out.")
    files = _files_to_read(files, notes)
    first_file = next(iter(files.values()))[0]
    trainer = str((_facts_or_none(first_file, path) or {}).get("trainer", ""))

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
            from verl_rc.records.token_records.token_parquet import read_facts  # noqa: PLC0415  (pyarrow)

            return read_facts(path, folder)
        return required_facts(_first_line(path, folder))
    except (DamagedRecordError, RefusedFileError):
        return None


def _first_line(path: Path, folder: Path | None) -> dict[str, Any] | None:
    with open_text(path, folder) as file:
        return parse_line(file.readline(1 << 20))


def _parquet(path: Path, folder: Path | None) -> TokenRecord:
    from verl_rc.records.token_records.token_parquet import read_record  # noqa: PLC0415  (pyarrow, without which JSON lines are read)

    return read_record(path, folder)
