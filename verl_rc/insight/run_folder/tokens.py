"""The token records of a run's folder: rows to show, the tokens that differ most, and profiles over all of
them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl_rc.data.token_record import (
    FOLDER,
    PIECES,
    Array,
    DamagedRecordError,
    TokenRecord,
    read_record,
    record_files,
)
from verl_rc.insight.run_folder.lines import read_records
from verl_rc.insight.run_folder.profiles import ProfileSums
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.insight.run_folder.token_data import TokenData, TokenRow, WorstToken

MOST_ROWS = 200
WORST_TOKENS = 50
_MOST_NAMED = 3


@dataclass
class _Reading:
    """What the first pass over the records collects."""

    profiles: ProfileSums = field(default_factory=ProfileSums)
    worst: list[WorstToken] = field(default_factory=list)
    candidates: list[tuple[float, int, Path, int]] = field(default_factory=list)
    """Squares, step, file and number of each row."""
    steps: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def add(self, step: int, path: Path) -> None:
        try:
            record = read_record(path)
        except DamagedRecordError as error:
            self.damaged.append(f"{path.name} ({error})")
            return
        self.steps.append(step)
        self.profiles.add(record)
        squares = _squares(record)
        self.candidates += [(value, step, path, index) for index, value in enumerate(squares.tolist())]
        self.worst = sorted([*self.worst, *_worst_of(record)], key=_distance, reverse=True)[:WORST_TOKENS]


def read_tokens(
    folder: Path,
    notes: list[str],
    first_step: int = 0,
    last_step: int = LARGEST_STEP,
    most_rows: int = MOST_ROWS,
) -> TokenData | None:
    """Read the records of a run's folder; None where there are none. A file that cannot be read is left out
    and named."""
    files = [(step, path) for step, path in record_files(folder / FOLDER) if first_step <= step <= last_step]
    reading = _Reading()
    for step, path in files:
        reading.add(step, path)
    if reading.damaged:
        named = "; ".join(reading.damaged[:_MOST_NAMED]) + (
            "; …" if len(reading.damaged) > _MOST_NAMED else ""
        )
        notes.append(f"{len(reading.damaged)} token record(s) cannot be read and are left out: {named}.")
    if not reading.steps:
        return None
    notes.append(f"Token records of {len(reading.steps)} steps were read, {len(reading.candidates):,} rows.")
    return TokenData(
        reading.steps,
        _rows(_chosen(reading, most_rows)),
        len(reading.candidates),
        reading.worst,
        reading.profiles.profiles(),
        _pieces(folder / FOLDER / PIECES, notes),
    )


def _squares(record: TokenRecord) -> Array:
    """float64 ``[rows]``: as in ``TokenRow.squares``."""
    logs, count = record.log_ratio(), len(record.lengths)
    if logs is None:
        return np.full(count, math.nan)
    squares = np.where(record.tokens["response_mask"], np.square(logs), 0.0)
    of_row = np.repeat(np.arange(count), record.lengths)
    return np.bincount(of_row, np.where(np.isfinite(squares), squares, np.inf), count).astype("float64")


def _worst_of(record: TokenRecord) -> list[WorstToken]:
    logs = record.log_ratio()
    if logs is None:
        return []
    size = np.where(record.tokens["response_mask"], np.nan_to_num(np.abs(logs), nan=np.inf), -1.0)
    largest = np.argsort(-size, kind="stable")[:WORST_TOKENS]
    of_row = np.repeat(np.arange(len(record.lengths)), record.lengths)
    ids, starts = record.tokens.get("response_ids"), record.starts
    return [
        WorstToken(
            record.step,
            int(record.rows["row"][of_row[i]]),
            int(i - starts[of_row[i]]),
            None if ids is None else int(ids[i]),
            int(record.tokens["token_class"][i]),
            float(record.tokens["rollout_log_prob"][i]),
            float(record.tokens["old_log_prob"][i]),
        )
        for i in largest.tolist()
        if size[i] > 0
    ]


def _distance(token: WorstToken) -> float:
    distance = abs(token.old_log_prob - token.rollout_log_prob)
    return math.inf if math.isnan(distance) else distance


def _chosen(reading: _Reading, most_rows: int) -> list[tuple[int, Path, int]]:
    """Rows of the newest record, half of the places at most, then the others by their gap."""
    newest = reading.steps[-1]

    def by_gap(candidate: tuple[float, int, Path, int]) -> tuple[float, int]:
        return (-1.0 if math.isnan(candidate[0]) else candidate[0], candidate[1])

    ordered = sorted(reading.candidates, key=by_gap, reverse=True)
    first = [one for one in ordered if one[1] == newest][: max(most_rows // 2, 1)]
    taken = {one[1:] for one in first}
    others = [one for one in ordered if one[1:] not in taken][: most_rows - len(first)]
    return [one[1:] for one in (*first, *others)]


def _rows(chosen: Sequence[tuple[int, Path, int]]) -> list[TokenRow]:
    """The rows themselves, each file read once."""
    rows: dict[tuple[Path, int], TokenRow] = {}
    for path in dict.fromkeys(path for _, path, _ in chosen):
        try:
            record = read_record(path)
        except DamagedRecordError:  # the run that still writes has removed it meanwhile
            continue
        squares = _squares(record)
        for index in (index for _, other, index in chosen if other == path):
            place = record.of_row(index)
            rows[path, index] = TokenRow(
                record.step,
                record.facts,
                {
                    name: values[index].item() if hasattr(values[index], "item") else values[index]
                    for name, values in record.rows.items()
                },
                {name: values[place].copy() for name, values in record.tokens.items()},
                None if record.prompts is None else record.prompts[index].copy(),
                float(squares[index]),
            )
    return [rows[path, index] for _, path, index in chosen if (path, index) in rows]


def _pieces(path: Path, notes: list[str]) -> dict[int, str]:
    pieces: dict[int, str] = {}
    for _, record in read_records(path, notes, max_complaints=1):
        found = record.get("pieces")
        for entry in found if isinstance(found, list) else ():
            if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int):
                pieces[entry[0]] = str(entry[1])
    return pieces
