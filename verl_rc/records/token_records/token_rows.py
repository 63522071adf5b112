"""Rows of token records as mappings, as JSON lines hold them, and their conversion to records."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verl_rc.records.token_records.token_record import (
    FIELDS,
    PROMPTS,
    REQUIRED,
    VERSION,
    VERSION_FACT,
    DamagedRecordError,
    TokenRecord,
    checked,
    with_defaults,
)

Row = Mapping[str, Any]
"""Values by name in ``FIELDS``, ``step`` and ``prompt_ids``: lists, arrays or single numbers."""
_PER_ROW_TOO = ("advantage", "version")
"""Fields of tokens for which a row may give one number."""


def record_of_rows(facts: Mapping[str, Any], step: int, rows: Sequence[Row]) -> TokenRecord:
    """The rows of one step as a record. A field that a row lacks is left out of the record.

    Raises:
        DamagedRecordError: a row lacks what every row must have, or its columns differ in length.
    """
    arrays = [_arrays(row, place) for place, row in enumerate(rows)]
    names = [name for name in FIELDS if arrays and all(name in fields for fields in arrays)]
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise DamagedRecordError(f"every row of step {step} must have {' and '.join(missing)}")
    tokens = {
        name: np.concatenate([fields[name] for fields in arrays])
        for name in names
        if FIELDS[name].is_of_tokens
    }
    columns = {
        name: np.array([fields[name] for fields in arrays], object if field.dtype == "str" else field.dtype)
        for name, field in FIELDS.items()
        if name in names and not field.is_of_tokens
    }
    prompts = [fields[PROMPTS] for fields in arrays] if all(PROMPTS in fields for fields in arrays) else None
    lengths = np.array([len(fields["response_mask"]) for fields in arrays], "int64")
    facts = {VERSION_FACT: VERSION, **facts, "step": step}
    present = {*names, *([] if prompts is None else [PROMPTS])}
    left_out = sorted({name for fields in arrays for name in fields} - present)
    columns = with_defaults(columns, len(rows), prompts)
    return checked(TokenRecord(facts, columns, lengths, tokens, prompts, left_out))


def _arrays(row: Row, place: int) -> dict[str, Any]:
    """The fields that a row has, those of tokens as arrays of one length."""
    try:
        arrays = {
            name: _array(name, value)
            for name, value in row.items()
            if value is not None and (name in FIELDS or name == PROMPTS)
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedRecordError(f"row {place}: {error}") from error
    length = len(arrays.get("response_mask", ()))
    for name in [name for name in arrays if name in FIELDS and FIELDS[name].is_of_tokens]:
        if arrays[name].ndim == 0 and name in _PER_ROW_TOO:
            arrays[name] = np.full(length, arrays[name])
        if arrays[name].shape != (length,):
            raise DamagedRecordError(
                f"row {place}: every field of tokens must have one value a token; response_mask has "
                f"{length:,}, {name} {arrays[name].size:,}"
            )
    return arrays


def _array(name: str, value: Any) -> Any:
    if name != PROMPTS and not FIELDS[name].is_of_tokens:
        return str(value) if FIELDS[name].dtype == "str" else np.dtype(FIELDS[name].dtype).type(value)
    kind = "int32" if name == PROMPTS else FIELDS[name].dtype
    # null becomes NaN, which integers do not have.
    values = np.asarray(value, "float64" if kind.startswith("float") else None)
    if values.size and not kind.startswith("float"):
        if values.dtype == object or not np.array_equal(values, np.rint(values)):
            raise ValueError(f"{name} must be whole numbers")
        if kind == "bool" and not np.isin(values, (0, 1)).all():
            raise ValueError(f"{name} must be 0 or 1")
    return values.astype(kind)


def parse_line(line: str) -> dict[str, Any] | None:
    """The object of a JSON line; None when it holds no object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def records_by_step(facts: Mapping[str, Any], rows: Iterable[Row]) -> Iterator[TokenRecord]:
    """Records of rows that come in any order of steps."""
    steps: dict[int, list[Row]] = {}
    for row in rows:
        step = row.get("step", facts.get("step"))
        if not isinstance(step, int) or isinstance(step, bool):
            raise DamagedRecordError(f"every row must have its step as a whole number, got {step!r}")
        steps.setdefault(step, []).append(_packed(row))
    for step in sorted(steps):
        yield record_of_rows(facts, step, steps.pop(step))


def _packed(row: Row) -> dict[str, Any]:
    """The fields of a row with lists of numbers as arrays, which take a tenth of the memory."""
    return {
        name: np.array(value, "float64") if _is_numbers(value) else value
        for name, value in row.items()
        if name in FIELDS or name == PROMPTS
    }


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(item is None or isinstance(item, int | float) for item in value)
