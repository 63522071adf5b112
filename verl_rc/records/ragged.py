"""Records without padding: they cross from one process to another, and micro-batches are padded from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from verl_rc.records.batches import COLUMNS, FIELDS, CriticBatch, TokenBatch, TrainBatch
from verl_rc.records.pictures import Pictures

Record = TypeVar("Record", bound=TokenBatch | TrainBatch | CriticBatch)
Column: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ragged(Generic[Record]):
    """Rows of a record without padding."""

    kind: type[Record]
    columns: Mapping[str, Column]
    """Columns by field, those of ``kind.tokens`` included: a value for each row, or for each token, row after
    row.

    Arrays cross Ray without a copy. One array stands for two fields where one tensor did, and travels once.
    """
    lengths: Mapping[str, Column]
    """int64 ``[B]`` by the symbols of ``FIELDS``: the number of values of each row in columns of this shape.
    """
    pictures: tuple[Pictures, ...] = ()
    """Those whose numbers are in the column ``pictures``: they are known in a process that has this."""

    @classmethod
    def from_record(cls, record: Record, rows: Sequence[int]) -> "Ragged[Record]":
        """Take ``rows`` of a padded record, in this order."""
        tokens = record if isinstance(record, TokenBatch) else record.tokens
        index = torch.tensor(rows)
        lengths = {
            "BP": tokens.prompt_lengths[index].numpy(),
            "BR": tokens.response_lengths[index].numpy(),
        }
        arrays = {id(tokens.prompt_lengths): lengths["BP"], id(tokens.response_lengths): lengths["BR"]}
        for name, symbols in COLUMNS.items():
            if (counts := getattr(tokens, f"{name}_counts")) is not None:
                lengths[symbols] = counts.sum(-1)[index].numpy()
        columns: dict[str, Column] = {}
        for owner in (tokens, record):
            for name in (field.name for field in fields(owner) if field.name in FIELDS):
                values: Tensor | None = getattr(owner, name)
                if values is None:
                    continue
                if id(values) not in arrays:
                    symbols = FIELDS[name][1]
                    own_lengths = lengths.get(symbols[:2])
                    arrays[id(values)] = (
                        values[index].numpy()
                        if own_lengths is None
                        else _without_padding(values.numpy(), rows, own_lengths, symbols)
                    )
                columns[name] = arrays[id(values)]
        numbers = set() if tokens.pictures is None else set(tokens.pictures[index].tolist()) - {0}
        return cls(type(record), columns, lengths, tuple(map(Pictures.known, sorted(numbers))))

    def padded(self, rows: Sequence[int]) -> Record:
        """``rows`` as a record, in this order, padded with 0 to the longest of them."""
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            if name not in self._rows:
                values[name] = torch.from_numpy(column[list(rows)])
                continue
            dtype, symbols = FIELDS[name]
            pieces = [self._rows[name][row] for row in rows]
            # A row may have no response token, but reductions over a width of 0 fail.
            width = max(1, *map(len, pieces))
            values[name] = torch.zeros(len(rows), width, *column.shape[1:], dtype=dtype)
            for padded_row, piece in zip(values[name].numpy(), pieces, strict=True):
                padded_row[_real(symbols, width, len(piece))] = piece
        size = [len(rows)]
        tokens = TokenBatch(
            **{field.name: values.pop(field.name, None) for field in fields(TokenBatch)}, batch_size=size
        )
        kind: Any = self.kind
        return cast(Record, tokens if kind is TokenBatch else kind(tokens=tokens, **values, batch_size=size))

    @cached_property
    def _rows(self) -> dict[str, list[Column]]:
        """The values of each row by field, of fields with several values a row."""
        return {
            name: rows_of(column, self.lengths[symbols])
            for name, column in self.columns.items()
            if (symbols := FIELDS[name][1][:2]) in self.lengths
        }


def rows_of(column: Column, lengths: Column) -> list[Column]:
    """Views of the values of each row in a column with a value for each token.

    Raises ``ValueError`` when there are more or fewer values than tokens.
    """
    ends = np.cumsum(lengths)
    if len(column) != ends[-1]:
        raise ValueError(f"a column must have {ends[-1]} values, one a token, got {len(column)}.")
    return np.split(column, ends[:-1])


def _without_padding(values: Column, rows: Sequence[int], lengths: Column, symbols: str) -> Column:
    """The values of the real tokens of padded rows (``[B, width, …]``), row after row; int64 becomes
    int32."""
    width = values.shape[1]
    real = [
        values[row, _real(symbols, width, length)] for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
    return np.concatenate(real, dtype=np.int32 if values.dtype == np.int64 else None)


def _real(symbols: str, width: int, length: int) -> slice:
    """The slice that holds the tokens of a row. A mask of all rows as index would need 8 bytes for each
    value."""
    return (
        slice(width - length, width) if symbols == "BP" else slice(length)
    )  # a prompt is padded on its left
