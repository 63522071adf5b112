"""Token records as parquet: one file a step in the run's folder, within a limit.

A file is written under another name and renamed, so that a killed run leaves complete files only.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from verl_rc.config.files import open_inside, whole_or_absent
from verl_rc.records.parquet_sizes import UnreadableSizesError, sizes_of
from verl_rc.records.token_records.token_record import (
    FIELDS,
    PROMPTS,
    REQUIRED,
    VERSION,
    VERSION_FACT,
    Array,
    DamagedRecordError,
    TokenRecord,
    checked,
    required_facts,
    with_defaults,
)

_FACTS = VERSION_FACT.encode()
"""Key of the facts in the file's metadata."""
_TEXTS = [name for name, field in FIELDS.items() if field.dtype == "str"]
_FREE_VALUES, _VALUES_OF_A_BYTE, _MOST_VALUES = 1 << 20, 64, 1 << 28
"""Values that a file may hold for itself, for each of its bytes, and in all. A log-prob takes two bytes and
more, and has some fifteen values beside it."""
_BYTES_OF_A_VALUE = 16
_NAME = re.compile(r"step_(\d{6,})\.parquet")
_REPLACED = "replaced"


def record_path(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step_{step:06d}.parquet"


def record_files(folder: Path) -> list[tuple[int, Path]]:
    """Step and file of every record in ``folder``, steps ascending."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step_*.parquet"))
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def write_record(folder: Path, record: TokenRecord) -> Path:
    """Write a record into ``folder``, readable by the user alone; it replaces an earlier one of the step."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(record.lengths)]).astype("int32"))
    columns: dict[str, Any] = {}
    for name, field in FIELDS.items():
        kind = field.stored or field.dtype
        if name in record.tokens:
            values = pa.array(record.tokens[name].astype(kind))
            columns[name] = pa.ListArray.from_arrays(offsets, values)
        elif name in record.rows:
            columns[name] = pa.array(record.rows[name], pa.type_for_alias(kind))
    if record.prompts is not None:
        prompts = [prompt.astype("int32") for prompt in record.prompts]
        columns[PROMPTS] = pa.array(prompts, pa.list_(pa.int32()))
    facts = {VERSION_FACT: VERSION, **record.facts}
    table = pa.table(columns).replace_schema_metadata({_FACTS: json.dumps(facts).encode()})
    leaves = {name: f"{name}.list.element" if name in (*record.tokens, PROMPTS) else name for name in columns}
    split = [name for name in record.tokens if FIELDS[name].dtype.startswith("float")]
    path = record_path(folder, record.step)
    with whole_or_absent(path) as file:
        parquet.write_table(
            table,
            file,
            compression="zstd",
            use_dictionary=[leaf for name, leaf in leaves.items() if name not in split],
            use_byte_stream_split=[leaves[name] for name in split],
        )
    return path


def read_record(path: Path, folder: Path | None = None) -> TokenRecord:
    """Read a file of this version; columns that ``FIELDS`` lacks are left out. ``folder``: as ``open_inside``
    takes it.

    Raises:
        DamagedRecordError: the file is no token record, is damaged, is of another version, holds more than
            its size allows, or lies outside ``folder``.
    """
    try:
        file = _opened(path, folder)
        facts = _facts(file.schema_arrow.metadata or {})
        names = [name for name in (*FIELDS, PROMPTS) if name in file.schema_arrow.names]
        missing = [name for name in REQUIRED if name not in names]
        if missing:
            raise DamagedRecordError(f"it has no column {', '.join(missing)}")
        table = file.read(columns=names, use_threads=False)
        columns = {name: _column(table, name) for name in names}
    except (OSError, pa.ArrowException, TypeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(" ".join(str(error).split())[:200]) from error
    token_columns = {name: columns[name] for name in names if name != PROMPTS and FIELDS[name].is_of_tokens}
    lengths = _common_lengths(token_columns)
    prompts = None
    if PROMPTS in columns:
        ids, offsets = _values(columns[PROMPTS].flatten()), columns[PROMPTS].offsets.to_numpy()
        prompts = [ids[a - offsets[0] : b - offsets[0]] for a, b in pairwise(offsets)]
    rows = {name: _values(columns[name]) for name in names if name not in (*token_columns, PROMPTS)}
    return checked(
        TokenRecord(
            facts,
            with_defaults(rows, len(lengths), prompts),
            lengths,
            {name: _values(column.flatten()) for name, column in token_columns.items()},
            prompts,
        )
    )


def _opened(path: Path, folder: Path | None) -> parquet.ParquetFile:
    """A file whose texts stay references to a dictionary. Raises ``OSError`` and ``DamagedRecordError``, also
    for one that would unfold to far more than its size."""
    source = open_inside(folder, path)
    size = os.fstat(source.fileno()).st_size
    metadata = parquet.read_metadata(source)
    try:
        sizes = sizes_of(source, metadata)
    except UnreadableSizesError as error:
        raise DamagedRecordError(str(error)) from error
    most = min(max(_FREE_VALUES, _VALUES_OF_A_BYTE * size), _MOST_VALUES)
    if sizes.values > most or sizes.num_bytes > _BYTES_OF_A_VALUE * most:
        raise DamagedRecordError(
            f"its {size:,} bytes unfold to {sizes.values:,} values of {sizes.num_bytes:,} bytes, and at most "
            f"{most:,} are read"
        )
    leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.path in _TEXTS and leaf.physical_type == "BYTE_ARRAY"]
    return parquet.ParquetFile(source, metadata=metadata, read_dictionary=texts)


def read_facts(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """The facts of a record without its columns. Raises ``DamagedRecordError``."""
    try:
        return _facts(_opened(path, folder).schema_arrow.metadata or {})
    except (OSError, pa.ArrowException) as error:
        raise DamagedRecordError(" ".join(str(error).split())[:200]) from error


def _facts(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        facts = required_facts(json.loads(metadata[_FACTS]))
        if not isinstance(facts["step"], int):
            raise TypeError("its step must be a whole number")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DamagedRecordError("it has no facts of a token record") from error
    return facts


def _column(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    is_list = name == PROMPTS or FIELDS[name].is_of_tokens
    if pa.types.is_dictionary(column.type) and not is_list:
        return _texts(column, name)
    kind = pa.int32() if name == PROMPTS else pa.type_for_alias(FIELDS[name].dtype)
    if is_list:
        # pyarrow 16 has no cast from float16; numpy makes it.
        stored = column.type.value_type if pa.types.is_list(column.type) else None
        kind = pa.list_(stored if stored == pa.float16() else kind)
    array = column.cast(kind).combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # a file without rows
        array = pa.array([], kind)
    if array.null_count or (is_list and array.flatten().null_count):
        raise DamagedRecordError(f"its column {name} has gaps")
    return array


def _texts(column: pa.ChunkedArray, name: str) -> Array:
    """The texts of a column of references; rows share the objects."""
    if column.null_count or not pa.types.is_string(column.type.value_type):
        raise DamagedRecordError(f"its column {name} must hold a text for each row")
    parts = [
        np.array(part.dictionary.to_pylist(), object)[part.indices.to_numpy()]
        for part in column.chunks
        if len(part)
    ]
    return np.concatenate([np.array([], object), *parts])


def _values(array: Any) -> Array:
    if isinstance(array, np.ndarray):
        return array
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.astype("float32") if values.dtype == np.float16 else values


def _common_lengths(columns: Mapping[str, Any]) -> Array:
    """Lengths of the rows. Raises ``DamagedRecordError`` unless all columns agree on them."""
    lengths = {name: np.diff(array.offsets.to_numpy()).astype("int64") for name, array in columns.items()}
    first = lengths["response_mask"]
    different = [name for name, values in lengths.items() if not np.array_equal(values, first)]
    if different:
        raise DamagedRecordError(f"its columns response_mask and {', '.join(different)} differ in length")
    return first


def set_aside_later(folder: Path, steps_done: int) -> None:
    """Rename the records after ``steps_done``, which a resumed run writes again, so that no reader finds
    them; remove partial files."""
    for partial in folder.glob(".step_*.partial"):
        partial.unlink(missing_ok=True)
    for step, path in record_files(folder):
        if step > steps_done:
            path.replace(path.with_name(f"{path.stem}.{_REPLACED}.parquet"))


def thin_out(folder: Path, max_bytes: int, max_files: int, lasting: Sequence[str]) -> int:
    """Remove files until the folder fits; returns their number.

    First files that a resumed run has replaced; then every second record, from the second oldest on, of those
    whose ``why`` is not in ``lasting``; last the records whose ``why`` is. The newest record stays.
    """
    sizes = {path: path.stat().st_size for path in folder.glob("*.parquet")}
    num_files, total = len(sizes), sum(sizes.values())

    def fits() -> bool:
        return total <= max_bytes and len(sizes) <= max_files

    for path in _in_order_of_removal(folder, sizes, lasting) if not fits() else ():
        path.unlink(missing_ok=True)
        total -= sizes.pop(path)
        if fits():
            break
    return num_files - len(sizes)


def _in_order_of_removal(folder: Path, sizes: Mapping[Path, int], lasting: Sequence[str]) -> Iterator[Path]:
    records = [path for _, path in record_files(folder)]
    yield from sorted(set(sizes) - set(records))
    is_last_resort = {path: _why(path) in lasting for path in records[:-1]}
    for last_resort in (False, True):
        remaining = [path for path in records[:-1] if is_last_resort[path] is last_resort]
        while remaining:
            yield from remaining[1::2] or remaining
            remaining = remaining[::2] if len(remaining) > 1 else []


def _why(path: Path) -> str:
    try:
        return str(read_facts(path).get("why", ""))
    except DamagedRecordError:
        return ""
