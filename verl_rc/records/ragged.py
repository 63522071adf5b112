"""Records without padding: they cross from one process to another, and micro-batches are cut from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from verl_rc.records.batches import COLUMNS, FIELDS, CriticBatch, TokenBatch, TrainBatch

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

    @classmethod
    def from_record(cls, record: Record, rows: Sequence[int]) -> "Ragged[Record]":
        """Take ``rows`` of a padded record, in this order."""
        tokens = record if isinstance(record, TokenBatch) else record.tokens
        index = torch.tensor(rows)
        lengths = {"BP": tokens.prompt_lengths[index], "BR": tokens.response_lengths[index]}
        for name, symbols in COLUMNS.items():
            if (counts := getattr(tokens, f"{name}_counts")) is not None:
                lengths[symbols] = counts[index].sum(-1)
        arrays: dict[int, Column] = {}
        columns: dict[str, Column] = {}
        for owner in (tokens, record):
            for name in (field.name for field in fields(owner) if field.name in FIELDS):
                values: Tensor | None = getattr(owner, name)
                if values is None:
                    continue
                if id(values) not in arrays:
                    symbols = FIELDS[name][1]
                    arrays[id(values)] = (
                        token_values(values, lengths[symbols[:2]], rows, symbols)
                        if symbols[:2] in lengths
                        else values[index].numpy()
                    )
                columns[name] = arrays[id(values)]
        return cls(type(record), columns)

    def padded(self) -> Record:
        """The rows as a record, padded with 0 to the longest of them."""
        lengths = {
            symbols: torch.tensor(self.columns[name])
            for symbols, name in (("BP", "prompt_lengths"), ("BR", "response_lengths"))
        }
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            symbols = FIELDS[name][1][:2]
            if symbols in lengths:
                # A row may have no response token, but reductions over a width of 0 fail.
                width = max(1, int(lengths[symbols].max()))
                values[name] = padded_values(name, column, lengths[symbols], width)
            else:
                values[name] = torch.tensor(column)
            lengths |= {
                lists: values[name].sum(-1) for owner, lists in COLUMNS.items() if name == f"{owner}_counts"
            }
        size = [len(lengths["BR"])]
        tokens = TokenBatch(
            **{field.name: values.pop(field.name, None) for field in fields(TokenBatch)}, batch_size=size
        )
        kind: Any = self.kind
        return cast(Record, tokens if kind is TokenBatch else kind(tokens=tokens, **values, batch_size=size))


def token_values(values: Tensor, lengths: Tensor, rows: Iterable[int], symbols: str = "BR") -> Column:
    """The values of the real tokens of padded rows (``[B, width]``, or ``[B, width, W]``), row after row;
    int64 becomes int32. ``lengths`` are those of ``rows``."""
    padded = values.numpy()
    real = [
        padded[row, _real(symbols, padded.shape[1], length)]
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
    joined: Column = np.concatenate([padded[:0].reshape(-1, *padded.shape[2:]), *real])
    return joined.astype(np.int32) if joined.dtype == np.int64 else joined


def padded_values(name: str, column: Column, lengths: Tensor, width: int) -> Tensor:
    """The field ``name`` of padded rows ``[B, width]``, or ``[B, width, W]``, from the values of its tokens;
    0 on padding.

    Raises ``ValueError`` when there are more or fewer values than tokens.
    """
    dtype, symbols = FIELDS[name]
    if len(column) != int(lengths.sum()):
        raise ValueError(f"{name} must have {int(lengths.sum())} values, one a token, got {len(column)}.")
    grid = torch.zeros(len(lengths), width, *column.shape[1:], dtype=dtype)
    start = 0
    for row, length in zip(grid.numpy(), lengths.tolist(), strict=True):
        row[_real(symbols, width, length)] = column[start : start + length]
        start += length
    return grid


def _real(symbols: str, width: int, length: int) -> slice:
    """Where the tokens of a row lie. A mask of all rows as index would need 8 bytes for each value."""
    return (
        slice(width - length, width) if symbols == "BP" else slice(length)
    )  # a prompt is padded on its left
