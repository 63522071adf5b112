"""The unpacked size of a parquet file, computed before it is read.

A page says in five bytes that a value comes a billion times, and the file's footer need not say the same as
its pages. So the headers of all pages are read, which are records of Thrift's compact protocol.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

_LONGEST_HEADER = 1 << 16
# Field numbers of PageHeader, and of the headers of kinds of pages within it.
_UNPACKED, _PACKED, _HEADERS = 2, 3, (5, 7, 8)
_VALUES, _ENCODINGS = 1, {5: 2, 8: 4}
_UNBOUNDED = 7
"""DELTA_BYTE_ARRAY: a text is written as the length of what it shares with the one before."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class UnreadableSizesError(ValueError):
    """The headers of a file's pages make no sense."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pages of a file."""

    values: int
    """Values of all columns; an empty list counts as one."""
    num_bytes: int
    """Unpacked size, with references to a dictionary as they are."""


def sizes_of(file: BinaryIO, metadata: Any) -> Sizes:
    """The sizes by the headers of all pages of a file with this ``pyarrow.parquet.FileMetaData``.

    Raises ``UnreadableSizesError``, also for an encoding that unfolds without bound.
    """
    values = num_bytes = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            begins = [column.data_page_offset]
            if column.has_dictionary_page and column.dictionary_page_offset:
                begins.append(column.dictionary_page_offset)
            for header in _page_headers(file, min(begins), column.total_compressed_size):
                num_bytes += _number(header, _UNPACKED)
                values += sum(_number(inner, _VALUES) for inner in _inner(header).values())
    return Sizes(values, num_bytes)


def _page_headers(file: BinaryIO, begin: int, length: int) -> Iterator[Mapping[int, Any]]:
    place, end = begin, begin + length
    while place < end:
        file.seek(place)
        reader = _Compact(file.read(_LONGEST_HEADER))
        header = reader.struct(0)
        if any(
            _inner(header).get(field, {}).get(place_of) == _UNBOUNDED
            for field, place_of in _ENCODINGS.items()
        ):
            raise UnreadableSizesError("a page has texts that unfold without bound")
        yield header
        place += reader.place + _number(header, _PACKED)


def _inner(header: Mapping[int, Any]) -> Mapping[int, Mapping[int, Any]]:
    """The header of the page's kind, by its field's number."""
    return {field: header[field] for field in _HEADERS if isinstance(header.get(field), dict)}


def _number(fields: Mapping[int, Any], field: int) -> int:
    number = fields.get(field)
    if type(number) is not int or number < 0:
        raise UnreadableSizesError("the header of a page has no size")
    return number


class _Compact:
    """A reader of structs, as Thrift's compact protocol writes them: fields by number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._zigzag()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in _INTEGERS:
            return self._zigzag()
        if kind in (_BYTE, _DOUBLE, _BINARY):
            return self._skip(self._varint() if kind == _BINARY else 1 if kind == _BYTE else 8)
        if kind == _STRUCT and depth < 4:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET) and depth < 4:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            for _ in range(min(count, _LONGEST_HEADER)):
                self._byte() if head & 15 in (_TRUE, _FALSE) else self._value(head & 15, depth + 1)
            return None
        raise UnreadableSizesError("the header of a page is damaged")

    def _skip(self, length: int) -> None:
        self.place += length
        if self.place > len(self._data):
            raise UnreadableSizesError("the header of a page is cut off")

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise UnreadableSizesError("the header of a page is damaged")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
