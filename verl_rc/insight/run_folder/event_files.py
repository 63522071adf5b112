"""TensorBoard event files, scalars only, read without TensorBoard.

A file is a row of records ``length (uint64), its checksum, data, checksum``; the data of a record is a
protocol buffer ``Event``.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

MARK = "tfevents"
"""What the name of every event file has."""
_LONGEST_RECORD = 64 << 20
_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, _BYTES: 0, 5: 4}
"""Bytes of a field by its kind, but of one whose length is written before it."""
# Field numbers of Event, Summary, Summary.Value and TensorProto.
_EVENT_STEP, _EVENT_SUMMARY, _SUMMARY_VALUE = 2, 5, 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_DTYPE, _TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES = 1, 4, 5, 6
_FLOAT, _DOUBLE = 1, 2


class DamagedFileError(ValueError):
    """The bytes make no sense from here on."""


def read_scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    """Step, tag and value of each scalar, up to the last whole record; ``DamagedFileError`` where the bytes
    make no sense."""
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            if length > _LONGEST_RECORD:
                raise DamagedFileError("a record is longer than any event")
            data = file.read(length + 4)
            if len(data) < length + 4:
                return
            try:
                yield from _scalars(data[:length])
            except (DamagedFileError, UnicodeDecodeError) as error:
                raise DamagedFileError(f"a record is no event ({error})") from error


def _scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    fields = dict(fields_of(event))
    step, summary = fields.get(_EVENT_STEP, 0), fields.get(_EVENT_SUMMARY)
    if isinstance(step, int) and isinstance(summary, bytes):
        for number, entry in fields_of(summary):
            if number == _SUMMARY_VALUE and isinstance(entry, bytes):
                value = dict(fields_of(entry))
                tag, scalar = value.get(_VALUE_TAG), _scalar(value)
                if isinstance(tag, bytes) and scalar is not None:
                    yield step, tag.decode("utf-8"), scalar


def _scalar(value: Mapping[int, int | bytes]) -> float | None:
    """The number of a value, also that of a tensor which holds one; None for text, histograms and
    pictures."""
    tensor = value.get(_VALUE_TENSOR)
    fields = dict(fields_of(tensor)) if isinstance(tensor, bytes) else {}
    is_double = fields.get(_TENSOR_DTYPE) == _DOUBLE
    if fields.get(_TENSOR_DTYPE) in (_FLOAT, _DOUBLE):
        packed = fields.get(_TENSOR_CONTENT, fields.get(_TENSOR_DOUBLES if is_double else _TENSOR_FLOATS))
    else:
        packed = value.get(_VALUE_SIMPLE)
    layout = struct.Struct("<d" if is_double else "<f")
    return layout.unpack(packed)[0] if isinstance(packed, bytes) and len(packed) == layout.size else None


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field; numbers of 4 and 8 bytes stay bytes.

    Raises ``DamagedFileError`` where there is no field.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind not in _SIZES:
            raise DamagedFileError("unknown kind of field")
        size, at = _varint(message, at) if kind == _BYTES else (_SIZES[kind], at)
        if at + size > len(message):
            raise DamagedFileError("a field is cut off")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and the place after it."""
    value = shift = 0
    while True:
        if at == len(message):
            raise DamagedFileError("a number is cut off")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise DamagedFileError("a number has no end")
