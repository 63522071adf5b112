"""Pictures of a prompt as encoded bytes. Pixels are made where they are needed, and never travel."""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary


class Pictures:
    """The pictures of one prompt, in their order. Equal ones are one object in each process.

    So the samples of a prompt share one object, also in what is sent to another process, and a batch holds
    numbers in place of bytes: ``known`` finds the pictures of a number while anything holds them.
    """

    data: tuple[bytes, ...]
    """Encoded images (PNG, JPEG and so on), at least one."""
    digests: tuple[str, ...]
    """SHA-256 of each, hexadecimal."""
    number: int
    """63 bits of the SHA-256 of all, at least 1."""
    __slots__ = ("__weakref__", "data", "digests", "number")

    def __new__(cls, data: Sequence[bytes]) -> "Pictures":
        """The object for these bytes."""
        if not data:
            raise ValueError("pictures are at least one image, got none.")
        digests = tuple(hashlib.sha256(image).hexdigest() for image in data)
        whole = hashlib.sha256("".join(digests).encode()).digest()
        number = max(1, int.from_bytes(whole[:8], "little") >> 1)
        with _LOCK:
            if (known := _KNOWN.get(number)) is not None:
                return known
            pictures = super().__new__(cls)
            pictures.data, pictures.digests, pictures.number = tuple(data), digests, number
            _KNOWN[number] = pictures
            return pictures

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes its one object of them, whose number follows from the bytes."""
        return Pictures, (self.data,)

    @staticmethod
    def known(number: int) -> "Pictures":
        """The pictures of this ``number``. Raises ``LookupError`` when nothing in this process holds them."""
        pictures = _KNOWN.get(number)
        if pictures is None:
            raise LookupError(
                f"the pictures of a row (number {number}) are not in this process: a row must be held, with "
                "its pictures, for as long as a batch has it."
            )
        return pictures


_LOCK = threading.Lock()
_KNOWN: WeakValueDictionary[int, Pictures] = WeakValueDictionary()


_CELL_KEYS = ("bytes", "image", "path")


def read_pictures(cells: Any, folder: Path) -> Pictures:
    """The pictures of a data file's cell, see ``image_bytes``; raises ``ValueError`` naming the picture."""
    if not isinstance(cells, Sequence) or isinstance(cells, str | bytes):
        cells = cells.tolist() if hasattr(cells, "tolist") else [cells]
    images = []
    for number, cell in enumerate(cells, 1):
        try:
            images.append(image_bytes(cell, folder))
        except (OSError, ValueError) as error:
            raise ValueError(f"picture {number}: {error}") from error
    return Pictures(images)


def image_bytes(cell: Any, folder: Path) -> bytes:
    """The encoded bytes of a data file's cell: bytes, a path, ``{"bytes": …, "path": …}`` or a PIL image.

    A relative path is one below ``folder``. Raises ``ValueError`` for anything else, and ``OSError`` for a
    file that cannot be read.
    """
    if isinstance(cell, Mapping):
        if ignored := [key for key, value in cell.items() if value is not None and key not in _CELL_KEYS]:
            raise ValueError(
                f"{ignored[0]!r} of a single picture is not read: drop it, data.mm_processor_kwargs holds "
                "for all"
            )
        cell = next((cell[key] for key in _CELL_KEYS if cell.get(key) is not None), None)
    if isinstance(cell, str):
        return (folder / Path(cell.removeprefix("file://")).expanduser()).read_bytes()
    if isinstance(cell, bytes):
        return cell
    if hasattr(cell, "save"):
        cell.save(buffer := BytesIO(), format="PNG")
        return buffer.getvalue()
    raise ValueError(f"an image must be bytes, a path or {{'bytes', 'path'}}, got {type(cell).__name__}")
