"""Records without padding: the driver holds them, they cross from one process to another, and blocks of rows
are padded from them where they are computed on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from verl_rc.records.batches import (
    FIELDS,
    CriticBatch,
    PolicyEvaluations,
    RolloutBatch,
    TokenBatch,
    TokenScores,
    TrainBatch,
)
from verl_rc.records.pictures import Pictures

AnyRecord: TypeAlias = TokenBatch | RolloutBatch | TokenScores | PolicyEvaluations | TrainBatch | CriticBatch
Record = TypeVar("Record", bound=AnyRecord)
Other = TypeVar("Other", bound=AnyRecord)
Column: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ragged(Generic[Record]):
    """``B`` rows of a record without padding, ``N`` response tokens in all.

    Its attributes are the columns of the fields of ``kind``, those of ``kind.tokens`` included, as tensors:
    ``[B]``, or ``[N]`` row after row; None where the record has no such field. 8-byte integers of tokens have
    4 bytes.
    """

    kind: type[Record]
    columns: Mapping[str, Column]
    """Columns by field.

    Arrays cross Ray without a copy. One array that stands for two fields travels once.
    """
    lengths: Mapping[str, Column]
    """int64 ``[B]`` by the symbols of ``FIELDS``: the number of values of each row in columns of this shape.
    """
    images: tuple[Pictures, ...] = ()
    """The pictures whose numbers are in the column ``pictures``, which a process knows that has this."""

    def __getattr__(self, name: str) -> Any:
        """See the class."""
        if name not in FIELDS:
            raise AttributeError(name)
        column = self.columns.get(name)
        return None if column is None else torch.from_numpy(column)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths["BR"])

    @property
    def tokens(self) -> "Ragged[TokenBatch]":
        """Prompts and responses alone."""
        return self.become(TokenBatch)

    def become(self, kind: type[Other], **changes: Tensor | Column | None) -> "Ragged[Other]":
        """The fields of ``kind`` that are here or, first, among ``changes``; None leaves one out."""
        given = {
            name: value.numpy() if isinstance(value, Tensor) else value
            for name, value in {**self.columns, **changes}.items()
        }
        names = {field.name for owner in (TokenBatch, kind) for field in fields(owner)}
        columns = {name: column for name, column in given.items() if column is not None and name in names}
        return Ragged(kind, columns, self.lengths, self.images)

    def without(self, *lists: str) -> "Ragged[Record]":
        """The rows without the lists of these names in ``COLUMNS``: for a model that chooses experts itself,
        or does not read heads."""
        left_out = {f"{name}_{part}" for name in lists for part in ("counts", "ids")}
        return replace(self, columns={n: c for n, c in self.columns.items() if n not in left_out})

    @property
    def sequence_lengths(self) -> Tensor:
        """int64 ``[B]``: prompt plus response tokens."""
        return torch.from_numpy(self.lengths["BP"] + self.lengths["BR"])

    @property
    def comparable_mask(self) -> Tensor:
        """bool ``[N]``: see ``TrainBatch.comparable_mask``."""
        counts, mask = self.support_counts, cast(Tensor, self.response_mask)
        return mask if counts is None else mask & (counts > 0)

    @property
    def untruncated_mask(self) -> Tensor:
        """bool ``[N]``: see ``TrainBatch.untruncated_mask``."""
        finished, mask = self.finished, cast(Tensor, self.response_mask)
        return mask if finished is None else mask & self.at_tokens(finished)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Values ``[B]`` of rows at each of their response tokens, ``[N]``."""
        return values.repeat_interleave(torch.from_numpy(self.lengths["BR"]))

    def take(self, rows: Sequence[int]) -> "Ragged[Record]":
        """These rows, in this order."""
        index = np.asarray(rows)
        taken: dict[int, Column] = {}
        for name, column in self.columns.items():
            if id(column) not in taken:
                pieces = None if self._symbols(name) is None else self._pieces(name, column, rows)
                taken[id(column)] = column[index] if pieces is None else np.concatenate(pieces)
        columns = {name: taken[id(column)] for name, column in self.columns.items()}
        numbers = set(columns["pictures"].tolist()) if "pictures" in columns else set()
        return replace(
            self,
            columns=columns,
            lengths={s: own[index] for s, own in self.lengths.items()},
            images=tuple(one for one in self.images if one.number in numbers),
        )

    def padded(self, rows: Sequence[int]) -> Record:
        """``rows`` as a record, in this order, padded with 0 to the longest of them."""
        values: dict[str, Any] = {
            name: torch.from_numpy(column[list(rows)])
            if self._symbols(name) is None
            else self._grid(name, column, rows, FIELDS[name][0])
            for name, column in self.columns.items()
        }
        size, kind = [len(rows)], cast(Any, self.kind)
        names = {field.name for field in fields(kind)}
        if kind is TokenBatch or "tokens" in names:
            tokens = {field.name: values.pop(field.name, None) for field in fields(TokenBatch)}
            if kind is TokenBatch:
                return cast(Record, kind(**tokens, batch_size=size))
            values["tokens"] = TokenBatch(**tokens, batch_size=size)
        return cast(Record, kind(**values, batch_size=size))

    def pad(self, values: Tensor | None, rows: Sequence[int]) -> Tensor | None:
        """``rows`` of a column ``[N, …]``, padded with 0 to the longest of them: ``[b, t, …]``."""
        if values is None:
            return None
        return self._grid("responses", values.numpy(), rows, values.dtype)

    def blocks(self, elements: int, groups: Tensor | None = None) -> list[list[int]]:
        """All rows in blocks of similar lengths: a padded block has at most ``elements`` places, or one row.

        ``groups``: int ``[B]``; rows of one number stay together.
        """
        lengths, members = self.lengths["BR"].tolist(), defaultdict[int, list[int]](list)
        for row, group in enumerate(range(len(self)) if groups is None else groups.tolist()):
            members[group].append(row)
        longest = {group: max(lengths[row] for row in rows) for group, rows in members.items()}
        blocks, width = list[list[int]](), 0
        for group in sorted(members, key=lambda group: -longest[group]):
            if not blocks or (len(blocks[-1]) + len(members[group])) * width > elements:
                blocks.append([])
                width = longest[group]
            blocks[-1] += members[group]
        return blocks

    def flattened(self, blocks: Sequence[Sequence[int]], padded: Sequence[Tensor]) -> Tensor:
        """The values ``[b, t]`` of each block of rows as a column ``[N]``."""
        lengths, pieces = self.lengths["BR"].tolist(), cast(list[Column], [None] * len(self))
        for rows, values in zip(blocks, padded, strict=True):
            for row, of_row in zip(rows, values.numpy(), strict=True):
                pieces[row] = of_row[: lengths[row]]
        return torch.from_numpy(np.concatenate(pieces))

    def row_sums(self, values: Tensor) -> Tensor:
        """Sums of a column ``[N]`` over each row, ``[B]``: float64, of integers and bools int64."""
        sums = np.zeros(len(self), np.float64 if values.is_floating_point() else np.int64)
        for row, of_row in enumerate(rows_of(values.numpy(), self.lengths["BR"])):
            sums[row] = of_row.sum(dtype=sums.dtype) if of_row.dtype != np.bool_ else np.count_nonzero(of_row)
        return torch.from_numpy(sums)

    def _symbols(self, name: str) -> str | None:
        """The shape of a field with several values a row, without what follows them. None for one value."""
        return symbols if (symbols := FIELDS[name][1][:2]) in self.lengths else None

    @cached_property
    def _starts(self) -> dict[str, list[int]]:
        """Where each row begins in columns of a shape, and where the last one ends."""
        return {symbols: [0, *np.cumsum(own).tolist()] for symbols, own in self.lengths.items()}

    def _pieces(self, name: str, column: Column, rows: Sequence[int]) -> list[Column]:
        """Views of the values of each of ``rows``."""
        starts = self._starts[cast(str, self._symbols(name))]
        return [column[starts[row] : starts[row + 1]] for row in rows]

    def _grid(self, name: str, column: Column, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        pieces = self._pieces(name, column, rows)
        # A row may have no response token, but reductions over a width of 0 fail.
        width = max(1, *map(len, pieces))
        grid = torch.zeros(len(rows), width, *column.shape[1:], dtype=dtype)
        is_prompt = name == "prompts"  # it is padded on its left
        for place, piece in zip(grid.numpy(), pieces, strict=True):
            place[width - len(piece) if is_prompt else 0 : width if is_prompt else len(piece)] = piece
        return grid


def rows_of(column: Column, lengths: Column) -> list[Column]:
    """Views of the values of each row in a column with a value for each token.

    Raises ``ValueError`` when there are more or fewer values than tokens.
    """
    ends = np.cumsum(lengths)
    if len(column) != ends[-1]:
        raise ValueError(f"a column must have {ends[-1]} values, one a token, got {len(column)}.")
    return np.split(column, ends[:-1])
