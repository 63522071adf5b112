"""The token records of a run's folder: rows to show, the tokens that differ most, and profiles over all of
them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_rc.insight.run_folder.bend import BendSums
from verl_rc.insight.run_folder.invariants import Invariants, broken_invariants
from verl_rc.insight.run_folder.lines import read_records
from verl_rc.insight.run_folder.profiles import ProfileSums
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.insight.run_folder.signature_sums import ComparedTokens
from verl_rc.insight.run_folder.token_data import MOST_PICTURE_BYTES, TokenData, TokenRow, WorstToken
from verl_rc.insight.run_folder.token_files import TokenSource
from verl_rc.insight.run_folder.token_metrics import metrics_of
from verl_rc.records.token_records.token_record import (
    PICTURES,
    TOKEN_CLASSES,
    Array,
    DamagedRecordError,
    TokenRecord,
)

MOST_ROWS = 200
WORST_TOKENS = 50


def read_tokens(
    source: TokenSource,
    notes: list[str],
    first_step: int = 0,
    last_step: int = LARGEST_STEP,
    most_rows: int = MOST_ROWS,
) -> TokenData | None:
    """Read the records of a run; None where none can be read. A step that cannot be read is left out and
    named."""
    profiles, bend = ProfileSums(), BendSums()
    worst: list[WorstToken] = []
    candidates: list[tuple[float, int, int]] = []  # squares (-1 where not known), step, number of each row
    metrics: dict[int, dict[str, float]] = {}
    facts: Mapping[str, Any] = {}
    invariants: dict[int, Invariants] = {}
    for record in source.records(first_step, last_step):
        metrics[record.step], facts = metrics_of(record), record.facts
        invariants[record.step] = broken_invariants(record)
        if (tokens := ComparedTokens.from_record(record)) is not None:
            profiles.add(tokens)
            bend.add(tokens)
        squares = np.nan_to_num(_squares(record), nan=-1.0, posinf=np.inf).tolist()
        candidates += [(value, record.step, index) for index, value in enumerate(squares)]
        worst = sorted([*worst, *_worst_of(record)], key=_distance, reverse=True)[:WORST_TOKENS]
    notes.extend(source.notes)
    if not metrics:
        return None
    notes.append(f"Token records of {len(metrics)} steps were read, {len(candidates):,} rows.")
    rows = _rows(source, _shown_keys(candidates, most_rows))
    return TokenData(
        list(metrics),
        rows,
        len(candidates),
        worst,
        profiles.profiles(),
        {} if source.pieces is None else _pieces(source.pieces, notes, source.folder),
        metrics,
        facts,
        invariants,
        bend.bend(),
        {} if source.pieces is None else _pictures(source.pieces.parent / PICTURES, rows),
    )


def _squares(record: TokenRecord) -> Array:
    """float64 ``[rows]``: as in ``TokenRow.squares``."""
    logs, count = record.log_ratio(), len(record.lengths)
    if logs is None:
        return np.full(count, math.nan)
    squares = np.where(record.tokens["response_mask"], np.square(logs), 0.0)
    return np.bincount(record.row_numbers, np.where(np.isfinite(squares), squares, np.inf), count)


def _worst_of(record: TokenRecord) -> list[WorstToken]:
    logs = record.log_ratio()
    if logs is None:
        return []
    size = np.where(record.tokens["response_mask"], np.nan_to_num(np.abs(logs), nan=np.inf), -1.0)
    largest = np.argsort(-size, kind="stable")[:WORST_TOKENS]
    row_numbers, starts = record.row_numbers, record.starts
    ids = record.tokens.get("response_ids")
    return [
        WorstToken(
            record.step,
            int(record.rows["row"][row_numbers[i]]),
            int(i - starts[row_numbers[i]]),
            None if ids is None else int(ids[i]),
            _class_of(record, i),
            float(record.tokens["rollout_log_prob"][i]),
            float(record.tokens["old_log_prob"][i]),
        )
        for i in largest.tolist()
        if size[i] > 0
    ]


def _class_of(record: TokenRecord, place: int) -> int | None:
    classes = record.tokens.get("token_class", ())
    return int(classes[place]) if len(classes) and 0 <= classes[place] < len(TOKEN_CLASSES) else None


def _distance(token: WorstToken) -> float:
    distance = abs(token.old_log_prob - token.rollout_log_prob)
    return math.inf if math.isnan(distance) else distance


def _shown_keys(candidates: Sequence[tuple[float, int, int]], most_rows: int) -> list[tuple[int, int]]:
    """Step and number of rows: those of the newest record, half of the places at most, then others by their
    gap."""
    newest = max((step for _, step, _ in candidates), default=0)
    ordered = sorted(candidates, key=lambda entry: entry[:2], reverse=True)
    first = [entry for entry in ordered if entry[1] == newest][: max(most_rows // 2, 1)]
    first_keys = {entry[1:] for entry in first}
    further = [entry for entry in ordered if entry[1:] not in first_keys][: most_rows - len(first)]
    return [entry[1:] for entry in (*first, *further)]


def _rows(source: TokenSource, keys: Sequence[tuple[int, int]]) -> list[TokenRow]:
    """The rows themselves, each step read once."""
    rows: dict[tuple[int, int], TokenRow] = {}
    for step in dict.fromkeys(step for step, _ in keys):
        try:
            record = source.read(step)
        except DamagedRecordError:  # the run that still writes has removed it meanwhile
            continue
        squares, ages = _squares(record), record.ages()
        tokens = record.tokens if ages is None else {**record.tokens, "age": ages}
        for index in (index for step_of_row, index in keys if step_of_row == step):
            place = record.span(index)
            rows[step, index] = TokenRow(
                record.step,
                record.facts,
                {
                    name: values[index].item() if hasattr(values[index], "item") else values[index]
                    for name, values in record.rows.items()
                },
                {name: values[place].copy() for name, values in tokens.items()},
                None if record.prompts is None else record.prompts[index].copy(),
                float(squares[index]),
            )
    return [rows[key] for key in keys if key in rows]


def _pictures(folder: Path, rows: Sequence[TokenRow]) -> dict[str, bytes]:
    found, left = dict[str, bytes](), MOST_PICTURE_BYTES
    for digest in dict.fromkeys(name for row in rows for name in row.picture_digests):
        path = folder / digest
        if path.is_file() and path.stat().st_size <= left:
            found[digest] = path.read_bytes()
            left -= len(found[digest])
    return found


def _pieces(path: Path, notes: list[str], folder: Path | None) -> dict[int, str]:
    pieces: dict[int, str] = {}
    for _, record in read_records(path, notes, max_complaints=1, folder=folder):
        texts = record.get("pieces")
        for entry in texts if isinstance(texts, list) else ():
            if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int):
                pieces[entry[0]] = str(entry[1])
    return pieces
