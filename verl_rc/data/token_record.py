"""Token records: what a step computed for each token of some of its rows, one parquet file a step in the
run's folder.

A file is written under another name and renamed, so a killed run leaves whole files only. ``pieces.jsonl``
beside them has the text of every token id, so that no tokenizer is needed to read them. Neither needs torch.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

FOLDER = "tokens"
"""Below the run's folder."""
PIECES = "pieces.jsonl"
SCHEMA_VERSION = 1
"""Increased when columns change their meaning; files of another version are not read."""

Array = npt.NDArray[Any]

ROW_COLUMNS: Mapping[str, pa.DataType] = {
    "row": pa.int32(),
    "group": pa.int32(),
    "source": pa.string(),
    "chosen_by": pa.string(),
    "inclusion": pa.float32(),
    "score": pa.float32(),
    "finished": pa.bool_(),
}
"""One value a row: its place in the batch, its prompt, the data source, ``random`` or ``worst``, the
probability with which a random row was taken, the outcome score, and whether a stop token ended it."""
TOKEN_COLUMNS: Mapping[str, pa.DataType] = {
    "response_ids": pa.int32(),
    "token_class": pa.int8(),
    "response_mask": pa.bool_(),
    "rollout_log_prob": pa.float32(),
    "old_log_prob": pa.float32(),
    "entropy": pa.float16(),
    "noise_scale": pa.float16(),
    "ref_log_prob": pa.float16(),
    "value": pa.float16(),
    "weight": pa.float16(),
    "kept": pa.bool_(),
    "advantage": pa.float32(),
    "version": pa.int32(),
}
"""One value a response token. ``noise_scale`` is the square root of ``g = 1 - 2p + sum of squared
probabilities``, the part of a logit's noise that reaches the token's log-prob; ``kept`` is False where
rollout correction rejects the token."""
_ALWAYS = ("token_class", "response_mask", "rollout_log_prob")
_PROMPTS = "prompt_ids"
_FACTS = b"verl_rc.token_record"
_NAME = re.compile(r"step_(\d{6,})\.parquet")
_REPLACED = "replaced"
_NUMPY: Mapping[pa.DataType, str] = {
    pa.int8(): "int8",
    pa.int32(): "int32",
    pa.bool_(): "bool",
    pa.float16(): "float16",
    pa.float32(): "float32",
}

TOKEN_CLASSES = ("word", "digits", "whitespace", "punctuation", "special", "fragment")
"""Kinds of tokens by their text; a fragment is part of a character, or not text at all."""


class DamagedRecordError(ValueError):
    """A file is no token record that can be read; the message says why."""


@dataclass(frozen=True)
class TokenRecord:
    """Some rows of one step: ``n`` rows, and the tokens of all their responses one behind the other."""

    facts: Mapping[str, Any]
    """Of the step and its run: at least ``step`` and ``why``."""
    rows: Mapping[str, Array]
    """``[n]`` by name in ``ROW_COLUMNS``."""
    lengths: Array
    """int64 ``[n]``: response tokens of each row."""
    tokens: Mapping[str, Array]
    """``[sum of lengths]`` by name in ``TOKEN_COLUMNS``; what was not computed is left out."""
    prompts: Sequence[Array] | None = None
    """Token ids of each row's prompt."""

    @property
    def step(self) -> int:
        """The training step."""
        return int(self.facts["step"])

    @property
    def starts(self) -> Array:
        """int64 ``[n]``: where each row's tokens begin."""
        starts: Array = np.cumsum(self.lengths) - self.lengths
        return starts

    def of_row(self, index: int) -> slice:
        """The tokens of a row."""
        start = int(self.starts[index])
        return slice(start, start + int(self.lengths[index]))

    def log_ratio(self) -> Array | None:
        """float64 ``[tokens]``: log-prob of the trainer less that of the engine, nats; None where the former
        is not known."""
        if "old_log_prob" not in self.tokens:
            return None
        with np.errstate(invalid="ignore"):
            difference: Array = (
                self.tokens["old_log_prob"].astype("float64") - self.tokens["rollout_log_prob"]
            )
        return difference


def record_path(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step_{step:06d}.parquet"


def record_files(folder: Path) -> list[tuple[int, Path]]:
    """Step and file of every record in ``folder``, steps ascending."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step_*.parquet"))
    return sorted((int(match[1]), path) for match, path in found if match is not None)


def write_record(folder: Path, record: TokenRecord) -> Path:
    """Write a record to its place in ``folder``, readable by the user alone; an earlier one of the step is
    replaced."""
    columns = {
        name: pa.array(record.rows[name], kind) for name, kind in ROW_COLUMNS.items() if name in record.rows
    }
    offsets = pa.array(np.concatenate([[0], np.cumsum(record.lengths)]).astype("int32"))
    for name, kind in TOKEN_COLUMNS.items():
        if name in record.tokens:
            columns[name] = pa.ListArray.from_arrays(
                offsets, pa.array(record.tokens[name].astype(_NUMPY[kind]))
            )
    if record.prompts is not None:
        columns[_PROMPTS] = pa.array(
            [prompt.astype("int32") for prompt in record.prompts], pa.list_(pa.int32())
        )
    facts = {**record.facts, "schema_version": SCHEMA_VERSION}
    table = pa.table(columns).replace_schema_metadata({_FACTS: json.dumps(facts).encode()})
    split = [
        f"{name}.list.element"
        for name, kind in TOKEN_COLUMNS.items()
        if name in columns and pa.types.is_floating(kind)
    ]
    others = [name if name in ROW_COLUMNS else f"{name}.list.element" for name in columns]
    path = record_path(folder, record.step)
    beside = folder / f".{path.name}.{os.getpid()}.partial"
    try:
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            parquet.write_table(
                table,
                file,
                compression="zstd",
                use_dictionary=[name for name in others if name not in split],
                use_byte_stream_split=split,
            )
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read_record(path: Path) -> TokenRecord:
    """Read what ``write_record`` wrote; columns that are not known are left out.

    Raises:
        DamagedRecordError: the file is none, is damaged, or has another version of the schema.
    """
    try:
        file = parquet.ParquetFile(path)
        facts = _facts(file.schema_arrow.metadata or {})
        known = {
            name: _type_of(name)
            for name in (*ROW_COLUMNS, *TOKEN_COLUMNS, _PROMPTS)
            if name in file.schema_arrow.names
        }
        missing = [name for name in (*ROW_COLUMNS, *_ALWAYS) if name not in known]
        if missing:
            raise DamagedRecordError(f"it has no column {', '.join(missing)}")
        table = file.read(columns=list(known), use_threads=False)
        arrays = {name: _column(table, name, kind) for name, kind in known.items()}
    except (OSError, pa.ArrowException, TypeError) as error:
        raise DamagedRecordError(" ".join(str(error).split())[:200]) from error
    lengths = _same_lengths({name: arrays[name] for name in TOKEN_COLUMNS if name in arrays})
    prompts = None
    if _PROMPTS in arrays:
        ids, offsets = _values(arrays[_PROMPTS].flatten()), arrays[_PROMPTS].offsets.to_numpy()
        prompts = [ids[a - offsets[0] : b - offsets[0]] for a, b in pairwise(offsets)]
    return TokenRecord(
        facts,
        {name: _values(arrays[name]) for name in ROW_COLUMNS},
        lengths,
        {name: _values(arrays[name].flatten()) for name in TOKEN_COLUMNS if name in arrays},
        prompts,
    )


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a record without its columns. Raises ``DamagedRecordError``."""
    try:
        return _facts(parquet.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException) as error:
        raise DamagedRecordError(" ".join(str(error).split())[:200]) from error


def _facts(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata[_FACTS])
        version, step = facts["schema_version"], facts["step"]
    except (KeyError, ValueError, TypeError) as error:
        raise DamagedRecordError("it has no facts of a token record") from error
    if version != SCHEMA_VERSION:
        raise DamagedRecordError(
            f"it has version {version} of the schema, and version {SCHEMA_VERSION} is read here"
        )
    if not isinstance(facts, dict) or not isinstance(step, int):
        raise DamagedRecordError("its facts are none of a token record")
    return facts


def _type_of(name: str) -> pa.DataType:
    if name == _PROMPTS:
        return pa.list_(pa.int32())
    return ROW_COLUMNS[name] if name in ROW_COLUMNS else pa.list_(TOKEN_COLUMNS[name])


def _column(table: pa.Table, name: str, kind: pa.DataType) -> Any:
    array = table.column(name).cast(kind).combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no rows at all
        array = pa.array([], kind)
    if array.null_count or (pa.types.is_list(kind) and array.flatten().null_count):
        raise DamagedRecordError(f"its column {name} has gaps")
    return array


def _values(array: Any) -> Array:
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.astype("float32") if values.dtype == np.float16 else values


def _same_lengths(columns: Mapping[str, Any]) -> Array:
    """Lengths of the rows. Raises ``DamagedRecordError`` unless all columns agree on them."""
    lengths = {name: np.diff(array.offsets.to_numpy()).astype("int64") for name, array in columns.items()}
    first = lengths["response_mask"]
    different = [name for name, found in lengths.items() if not np.array_equal(found, first)]
    if different:
        raise DamagedRecordError(f"its columns response_mask and {', '.join(different)} differ in length")
    return first


def set_aside_later(folder: Path, steps_done: int) -> None:
    """Give the records after ``steps_done``, which a resumed run does again, names that no reader looks at;
    remove half files."""
    for partial in folder.glob(".step_*.partial"):
        partial.unlink(missing_ok=True)
    for step, path in record_files(folder):
        if step > steps_done:
            path.replace(path.with_name(f"{path.stem}.{_REPLACED}.parquet"))


def thin_out(folder: Path, max_bytes: int, max_files: int, keeps: Sequence[str]) -> int:
    """Remove files until the folder fits; returns how many went.

    First those that a resumed run replaced; then every second record, beginning with the second oldest, of
    those whose ``why`` is not in ``keeps``; at last of the others. The newest record stays.
    """
    sizes = {path: path.stat().st_size for path in folder.glob("*.parquet")}
    before, total = len(sizes), sum(sizes.values())

    def fits() -> bool:
        return total <= max_bytes and len(sizes) <= max_files

    for path in _in_order_of_removal(folder, sizes, keeps) if not fits() else ():
        path.unlink(missing_ok=True)
        total -= sizes.pop(path)
        if fits():
            break
    return before - len(sizes)


def _in_order_of_removal(folder: Path, sizes: Mapping[Path, int], keeps: Sequence[str]) -> Iterator[Path]:
    records = [path for _, path in record_files(folder)]
    yield from sorted(set(sizes) - set(records))
    kept = {path for path in records[:-1] if _why(path) in keeps}
    for part in (
        [path for path in records[:-1] if path not in kept],
        [path for path in records[:-1] if path in kept],
    ):
        left = part
        while left:
            yield from left[1::2] if len(left) > 1 else left
            left = left[::2] if len(left) > 1 else []


def _why(path: Path) -> str:
    try:
        return str(read_facts(path).get("why", ""))
    except DamagedRecordError:
        return ""


def class_of(text: str, is_special: bool) -> int:
    """The number in ``TOKEN_CLASSES`` of a token with this text."""
    bare = text.strip()
    if is_special:
        name = "special"
    elif "�" in text or not text:
        name = "fragment"
    elif not bare:
        name = "whitespace"
    elif bare.isdecimal():
        name = "digits"
    else:
        name = "word" if any(letter.isalnum() for letter in bare) else "punctuation"
    return TOKEN_CLASSES.index(name)
