"""Messages through a pipe to a process that may hang, die or write anything: each call has a deadline."""

import math
import os
import pickle
import struct
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from select import POLLIN, POLLOUT, poll
from typing import Any

_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")
"""The length of a message stands before it, as in ``multiprocessing.connection``: -1 precedes a long one."""
_LONGEST_SHORT = 0x7FFFFFFF
_MAX_BYTES = 1 << 30
"""Letters in place of a length are more."""
_CHUNK = 1 << 20


class GarbledError(Exception):
    """The bytes of the other process are no message; the text says why."""


def send(connection: Connection, message: object, deadline: float) -> None:
    """Send a message until ``deadline``, in seconds of ``time.monotonic``. The other end may receive it with
    ``Connection.recv``.

    Raises ``TimeoutError`` at the deadline, and ``OSError`` when the other end has closed.
    """
    body = bytes(ForkingPickler.dumps(message))
    is_short = len(body) <= _LONGEST_SHORT
    header = _SHORT.pack(len(body)) if is_short else _SHORT.pack(-1) + _LONG.pack(len(body))
    descriptor = connection.fileno()
    os.set_blocking(descriptor, False)
    for part in (header, body):
        rest = memoryview(part)
        while rest:
            _wait(descriptor, POLLOUT, deadline)
            rest = rest[os.write(descriptor, rest[:_CHUNK]) :]


def receive(connection: Connection, deadline: float) -> Any:
    """The next message, which the other end may send with ``Connection.send``.

    Raises ``TimeoutError`` at the deadline, also when a part of the message has come; ``EOFError`` or
    ``OSError`` when the other end has closed; ``GarbledError`` for anything but a message.
    """
    descriptor = connection.fileno()
    (length,) = _SHORT.unpack(_read(descriptor, _SHORT.size, deadline))
    if length == -1:
        (length,) = _LONG.unpack(_read(descriptor, _LONG.size, deadline))
    if not 0 <= length <= _MAX_BYTES:
        raise GarbledError(f"a message must have at most {_MAX_BYTES} bytes, got one of {length}")
    body = _read(descriptor, length, deadline)
    try:
        return pickle.loads(body)
    except Exception as error:  # bytes that are no pickle raise nearly all there are
        raise GarbledError(f"a message must be a pickle, and reading it raised {error!r:.200}") from error


def _read(descriptor: int, length: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < length:
        _wait(descriptor, POLLIN, deadline)
        chunk = os.read(descriptor, min(_CHUNK, length - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a descriptor can be read or written. Raises ``TimeoutError`` at the deadline."""
    ready = poll()
    ready.register(descriptor, event)
    remaining = max(0.0, deadline - time.monotonic())
    if not ready.poll(None if math.isinf(remaining) else math.ceil(1000 * remaining)):
        raise TimeoutError
