"""TensorBoard event files, scalars only, read without TensorBoard.

A file is a row of records ``length (uint64), its checksum, data, checksum``; the data of a record is a
protocol buffer ``Event``.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

MARK = "tfevents"
"""What the name of every event file has."""
_LONGEST_RECORD = 64 << 20
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
# Field numbers of Event, Summary, Summary.Value and TensorProto.
_EVENT_STEP, _EVENT_SUMMARY, _SUMMARY_VALUE = 2, 5, 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_DTYPE, _TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES = 1, 4, 5, 6
_FLOAT, _DOUBLE = 1, 2

Field = tuple[int, int | bytes]


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
            except (DamagedFileError, struct.error, UnicodeDecodeError) as error:
                raise DamagedFileError(f"a record is no event ({error})") from error


def _scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    fields = dict(fields_of(event))
    step, summary = fields.get(_EVENT_STEP, 0), fields.get(_EVENT_SUMMARY)
    if isinstance(step, int) and isinstance(summary, bytes):
        for number, entry in fields_of(summary):
            if number == _SUMMARY_VALUE and isinstance(entry, bytes):
                tag, scalar = _tag_and_value(entry)
                if scalar is not None:
                    yield step, tag, scalar


def _tag_and_value(entry: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in fields_of(entry):
        if number == _VALUE_TAG and isinstance(value, bytes):
            tag = value.decode("utf-8")
        elif number == _VALUE_SIMPLE and isinstance(value, bytes):
            (scalar,) = struct.unpack("<f", value)
        elif number == _VALUE_TENSOR and isinstance(value, bytes):
            scalar = _tensor_scalar(value)
    return tag, scalar


def _tensor_scalar(tensor: bytes) -> float | None:
    """The number of a tensor that holds one; None for text, histograms and pictures."""
    fields = dict(fields_of(tensor))
    kind = fields.get(_TENSOR_DTYPE)
    if kind not in (_FLOAT, _DOUBLE):
        return None
    layout = "<f" if kind == _FLOAT else "<d"
    packed = fields.get(_TENSOR_CONTENT, fields.get(_TENSOR_FLOATS if kind == _FLOAT else _TENSOR_DOUBLES))
    if not isinstance(packed, bytes) or len(packed) != struct.calcsize(layout):
        return None
    (value,) = struct.unpack(layout, packed)
    return float(value)


def fields_of(message: bytes) -> Iterator[Field]:
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
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise DamagedFileError("unknown kind of field")
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
