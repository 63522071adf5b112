"""Rows of data files as plain records: parquet, JSON lines or JSON, with errors that name the file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Record = dict[str, Any]


class RecordFile:
    """One file of rows, read whole and kept as an Arrow table; rows become Python objects when they are asked for."""

    def __init__(self, path: str, columns: Sequence[str], optional_columns: Sequence[str] = ()) -> None:
        """Read ``columns`` (and ``optional_columns`` where they exist) of ``path``.

        Raises ``ValueError`` when the file is missing, unreadable or empty, or lacks one of ``columns``.
        """
        self.path = path
        table = _read_table(path)
        present = table.column_names
        missing = [name for name in columns if name not in present]
        if missing:
            raise ValueError(
                f"a data file must have the columns {list(columns)}, but {path} lacks {missing}; it has {present}. "
                "Convert the file, or name its columns with data.prompt_key (RL) or data.messages_key (SFT)."
            )
        if table.num_rows == 0:
            raise ValueError(f"a data file must have at least one row, but {path} has none. Remove it from the list.")
        self._table = table.select([*columns, *(name for name in optional_columns if name in present)])

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column, row by row."""
        values: list[Any] = self._table.column(name).to_pylist()
        return values

    def __getitem__(self, index: int) -> Record:
        """Row ``index`` as a record; a column whose value is null is left in as None."""
        record: Record = self._table.slice(index, 1).to_pylist()[0]
        return record


def _read_table(path: str) -> pa.Table:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"data files must exist, but {path!r} is {'a folder' if file.is_dir() else 'not there'}. "
            "Check data.train_files and data.val_files (scripts/prepare_data/ writes examples)."
        )
    try:
        if file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8").splitlines()
            return pa.Table.from_pylist([json.loads(line) for line in lines if line.strip()])
        if file.suffix == ".json":
            return pa.Table.from_pylist(json.loads(file.read_text(encoding="utf-8")))
        return pq.read_table(file)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"data files must be parquet, .jsonl (one record per line) or .json (a list of records), but {path} "
            f"could not be read: {error}"
        ) from error


def check_messages(messages: Any, column: str, where: str) -> list[dict[str, Any]]:
    """``messages`` as chat messages without empty entries.

    Raises ``ValueError`` naming ``column`` and ``where`` unless it is a list of mappings with a role and a text.
    """
    valid = isinstance(messages, list) and len(messages) > 0 and all(_is_message(message) for message in messages)
    if not valid:
        raise ValueError(
            f"column {column!r} must hold a list of chat messages {{'role': ..., 'content': text}}, got "
            f"{str(messages)[:120]!r} in {where}. Convert the column, or name another one."
        )
    # Arrow gives every message of a file the same keys and fills the gaps with None.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
