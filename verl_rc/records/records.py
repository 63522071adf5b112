"""Reading rows from parquet, JSON lines or JSON files, or from the user's class, with errors that name the
row."""

import inspect
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from verl_rc.config.task import DataConfig
from verl_rc.config.user_code import load_from_file
from verl_rc.records.unread import MEDIA, UNREAD, refuse_unread

Record = dict[str, Any]
T = TypeVar("T")


class RecordFile:
    """One file of rows in memory; a row becomes Python objects on access.

    A row of JSON is what is written there. Parquet has one type for all values of a column: numbers are
    floats where one of them is, and mappings have the keys of all rows, with None.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str],
        optional_columns: Sequence[str] = (),
        messages: str | None = None,
    ) -> None:
        """Read ``columns`` (and ``optional_columns`` where they exist) of ``path``.

        ``messages``: the column of chat messages. Fields that are null in parquet are left out there, at
        every depth.

        Raises ``ValueError`` when the file is missing, unreadable or empty, lacks one of ``columns``, has a
        column that belongs to the prompt and is not read, or is not valid UTF-8.
        """
        self.path = path
        self._rows = _read_rows(path)
        self.require(columns)
        if len(self) == 0:
            raise ValueError(
                f"a data file must have at least one row, but {path} has none. Remove it from the list."
            )
        for name in [name for name in self.columns if name in UNREAD and name not in optional_columns]:
            for row, value in enumerate(self.column(name)):
                refuse_unread({name: value}, f"row {row} of {path}")
        selection = list(
            dict.fromkeys([*columns, *(name for name in optional_columns if name in self.columns)])
        )
        self.unread_columns = [name for name in self.columns if name not in selection]
        """Names of the columns that are not read."""
        self._converted(lambda: self._rows.select(selection, messages), "its columns")

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return self._rows.columns

    def require(self, columns: Sequence[str]) -> None:
        """Raise ``ValueError`` naming those of ``columns`` that the file lacks."""
        missing = [name for name in columns if name not in self.columns]
        if missing:
            raise ValueError(
                f"a data file must have the columns {list(columns)}, but {self.path} lacks {missing}; it has "
                f"{self.columns}. Convert the file, or name its columns with data.prompt_key (RL) or "
                "data.messages_key (SFT)."
            )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        """All rows, faster than by their numbers."""
        rows = iter(self._rows)
        for index in range(len(self)):
            yield self._converted(lambda: next(rows), f"row {index}")

    def column(self, name: str) -> list[Any]:
        """The values of one column, row by row."""
        return self._converted(lambda: self._rows.column(name), f"column {name!r}")

    def __getitem__(self, index: int) -> Record:
        """Row ``index`` as a record; a value that it lacks is None."""
        return self._converted(lambda: self._rows[index], f"row {index}")

    def _converted(self, convert: Callable[[], T], part: str) -> T:
        """The result of ``convert``. Raises ``ValueError`` naming the ``part`` of the file."""
        try:
            return convert()
        except Exception as error:
            raise ValueError(
                f"{part} of {self.path} must be readable, got the error: {error}. Write the file anew."
            ) from error


class _ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._messages: str | None = None

    @property
    def columns(self) -> list[str]:
        names: list[str] = self._table.column_names
        return names

    def select(self, columns: Sequence[str], messages: str | None) -> None:
        """Keep ``columns``. Raises an exception when their values are damaged."""
        self._table = self._table.select(columns)
        self._table.validate(full=True)
        self._messages = messages if messages in columns else None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Record:
        [record] = self._records(self._table.slice(index, 1))
        return record

    def __iter__(self) -> Iterator[Record]:
        return (record for batch in self._table.to_batches(_BATCH_ROWS) for record in self._records(batch))

    def column(self, name: str) -> list[Any]:
        return [record[name] for record in self._records(self._table.select([name]))]

    def _records(self, rows: "pa.Table | pa.RecordBatch") -> Iterator[Record]:
        for record in rows.to_pylist(maps_as_pydicts="strict"):
            if self._messages in record:
                record[self._messages] = _without_nulls(record[self._messages])
            yield record


class _JsonRows:
    """The records of a JSON lines or JSON file, as text."""

    def __init__(self, records: Any, unit: str) -> None:
        """``unit``: a record's name in messages. Raises ``ValueError`` unless it is a list of records."""
        if not isinstance(records, list):
            raise ValueError(f"it holds no list but {type(records).__name__}")
        bad = next((number for number, record in enumerate(records, 1) if not isinstance(record, dict)), None)
        if bad is not None:
            raise ValueError(f"{unit} {bad} is no record but {str(records[bad - 1])[:80]!r}")
        self.columns = list(dict.fromkeys(name for record in records for name in record))
        self._records: list[Record] = records
        self._lines: list[bytes] = []

    def select(self, columns: Sequence[str], _: str | None) -> None:
        """Keep ``columns``. Raises ``ValueError`` for half a character, which no tokenizer takes."""
        self.columns = list(columns)
        self._lines = [
            json.dumps(
                {name: record[name] for name in columns if name in record}, ensure_ascii=False
            ).encode()
            for record in self._records
        ]
        self._records = []

    def __len__(self) -> int:
        return len(self._records or self._lines)

    def __getitem__(self, index: int) -> Record:
        record = json.loads(self._lines[index])
        return {name: record.get(name) for name in self.columns}

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def column(self, name: str) -> list[Any]:
        return [record.get(name) for record in self._records or self]


_BATCH_ROWS = 1024


def _without_nulls(value: Any) -> Any:
    """``value`` without the entries of mappings that are None, at every depth."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value


class VerifiersRecords:
    """The rows of a file in the format of ``verifiers`` as records in verl's.

    A row has ``prompt`` (chat messages) or ``question`` (a text), and ``answer``; ``info`` (a mapping, or one
    as JSON text), ``task`` and ``agent_name`` if there are any. ``answer`` becomes the ground truth, ``info``
    the extra info and ``task`` the data source.
    """

    COLUMNS = ("question", "answer", "info", "task")

    @staticmethod
    def fits(file: RecordFile) -> bool:
        """Whether a file is in this format."""
        return "reward_model" not in file.columns and "answer" in file.columns

    def __init__(self, file: RecordFile, prompt_key: str) -> None:
        """``file``: read with ``COLUMNS`` and ``prompt_key``. Raises ``ValueError`` when it lacks prompts."""
        self.path = file.path
        self.unread_columns = file.unread_columns
        self._file = file
        self._prompt_key = prompt_key
        if prompt_key not in file.columns:
            file.require(("question", "answer"))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._file)

    def __iter__(self) -> Iterator[Record]:
        """All rows."""
        return map(self._converted, self._file, range(len(self)))

    def column(self, name: str) -> list[Any]:
        """The values of one column in verl's format, row by row."""
        return [record[name] for record in self]

    def __getitem__(self, index: int) -> Record:
        """Row ``index`` as a record. Raises ``ValueError`` when its ``info`` is no JSON."""
        return self._converted(self._file[index], index)

    def _converted(self, row: Record, index: int) -> Record:
        prompt = row.get(self._prompt_key)
        if prompt is None or isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt or row.get("question")}]
        info = row.get("info")
        try:
            info = json.loads(info) if isinstance(info, str) and info else info
        except ValueError as error:
            raise ValueError(
                f"column 'info' must hold a mapping, or one as JSON, but row {index} of {self.path} does "
                f"not: {error}."
            ) from error
        return {
            self._prompt_key: prompt,
            "data_source": row.get("task") or "verifiers",
            "reward_model": {"ground_truth": row["answer"]},
            "extra_info": info or None,
            "agent_name": row.get("agent_name"),
        }


def _read_rows(path: str) -> _ParquetRows | _JsonRows:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"data files must exist, but {path!r} is {'a folder' if file.is_dir() else 'not there'}. Check "
            "data.train_files and data.val_files (scripts/prepare_data/ writes examples)."
        )
    try:
        if file.suffix == ".jsonl":
            # Not splitlines(): a text may hold Unicode's line separators.
            lines = file.read_text(encoding="utf-8").split("\n")
            records = [
                _parsed(line, f"line {number}") for number, line in enumerate(lines, 1) if line.strip()
            ]
            return _JsonRows(records, "line")
        if file.suffix == ".json":
            return _JsonRows(_parsed(file.read_text(encoding="utf-8"), "the file"), "record")
        return _ParquetRows(pq.read_table(file))
    except Exception as error:
        raise ValueError(
            "data files must be parquet, .jsonl (one record per line) or .json (a list of records), but "
            f"{path} could not be read: {error}. Write it anew, or drop it."
        ) from error


def _parsed(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location} is not JSON: {error}") from error


def check_messages(messages: Any, column: str, location: str) -> list[dict[str, Any]]:
    """``messages`` as chat messages; a field that is None counts as absent.

    Raises ``ValueError`` naming ``column`` and ``location`` unless it is a list of mappings with a role and a
    text.
    """
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(
            f"column {column!r} must hold a list of chat messages {{'role': ..., 'content': text}}, got "
            f"{str(messages)[:120]!r} in {location}. Convert the column, or name another one."
        )
    for message in messages:
        refuse_unread(message, f"a message of column {column!r} in {location}", MEDIA)
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


_KEY = "data.custom_cls"


class CustomRecords:
    """The rows of an instance of ``data.custom_cls``, instead of a data file.

    The class is called with verl's keyword arguments ``data_files``, ``tokenizer``, ``processor`` (always
    None) and ``config``, and has ``__len__`` and ``__getitem__``. A row is a mapping in verl's format: chat
    messages under ``data.prompt_key`` or ``raw_prompt``, ``data_source``, ``reward_model``, and
    ``extra_info`` if there is any. It is selected, tokenised and truncated like a file's row.
    """

    def __init__(self, config: DataConfig, data_files: Sequence[str], tokenizer: Any) -> None:
        """Create the instance. Raises ``ValueError`` when the class cannot be loaded, or has no length or no
        row."""
        path, name = config.custom_cls.path, config.custom_cls.name
        assert path is not None
        assert name is not None
        self.path = f"{name} of {path}"
        self.unread_columns: list[str] = []
        self._prompt_key = config.prompt_key
        cls = load_from_file(path, name, _KEY, "class", inspect.isclass)
        try:
            self._rows = cls(data_files=list(data_files), tokenizer=tokenizer, processor=None, config=config)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{self.path} ({_KEY}) must take data_files, tokenizer, processor and config, but it raised "
                f"{error!r}."
            ) from error
        if not hasattr(self._rows, "__len__") or not hasattr(self._rows, "__getitem__"):
            raise ValueError(
                f"{_KEY}.name must name a class with __len__ and __getitem__, {self.path} lacks one of them."
            )
        if len(self) == 0:
            raise ValueError(
                f"{self.path} ({_KEY}) must give at least one row for {list(data_files)}, it gives none."
            )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column, row by row; reads every row."""
        return [self[index][name] for index in range(len(self))]

    def __getitem__(self, index: int) -> Record:
        """Row ``index`` as a record. Raises ``ValueError`` when it is not a mapping or lacks a column."""
        try:
            row = self._rows[index]
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{self.path} ({_KEY}) must give {len(self)} rows, but row {index} raised {error!r}."
            ) from error
        record = dict(row) if isinstance(row, Mapping) else {}
        refuse_unread(record, f"row {index} of {self.path}")
        if self._prompt_key not in record and "raw_prompt" in record:
            record[self._prompt_key] = record["raw_prompt"]
        missing = [name for name in (self._prompt_key, "data_source", "reward_model") if name not in record]
        if missing:
            raise ValueError(
                f"a row of {self.path} must be a mapping with the keys {self._prompt_key!r} (or "
                f"'raw_prompt'), 'data_source' and 'reward_model', but row {index} lacks {missing}; it is "
                f"{str(row)[:120]}."
            )
        self._require_picklable(record, index)
        return record

    def _require_picklable(self, record: Record, index: int) -> None:
        for name in {self._prompt_key, "data_source", "reward_model", "extra_info", "agent_name"} & {*record}:
            try:
                pickle.dumps(record[name])
            except Exception as error:
                raise ValueError(
                    f"a row of {self.path} must hold values that can be pickled, because other processes get "
                    f"them, but {name!r} of row {index} raised {error!r}. Give plain values there."
                ) from error
