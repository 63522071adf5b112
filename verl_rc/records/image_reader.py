"""What a model makes of pictures: placeholder tokens in the prompt, and pixels."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor

from verl_rc.config.models import model_source
from verl_rc.config.task import PixelLimits
from verl_rc.records.pictures import Pictures, read_pictures
from verl_rc.records.vision_models import reads_pictures

MARK = "<image>"
"""Stands for a picture in the text of a prompt, as in verl's data."""
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_MOST_PIXELS = 64 << 20
_LARGEST_RATIO = 200
_CACHED_BYTES = 256 << 20


class ImageReader:
    """The image processor of a model, the same in driver, engines and trainer.

    PIL resizes: torchvision's processors give other pixels.
    """

    def __init__(self, path: str, options: PixelLimits, most: int | None = None) -> None:
        """``options``: ``data.mm_processor_kwargs``. ``most``: pictures of a prompt, None for any number.

        Raises ``ValueError`` for limits that leave no size, and for a folder without an image processor.
        """
        source = model_source(path)
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(source, backend="pil")
        except OSError as error:
            raise ValueError(
                f"a model that reads pictures must have a preprocessor_config.json, and {source} has none "
                "that transformers reads: copy it from the model that it was made of"
            ) from error
        if options:
            given = {_EDGES[name]: value for name, value in options.items()}
            self._processor.size = replace(self._processor.size, **given)
        size = self._processor.size
        if size.shortest_edge > size.longest_edge:
            raise ValueError(
                f"data.mm_processor_kwargs must leave min_pixels <= max_pixels, got {size.shortest_edge} and "
                f"{size.longest_edge}: the model's where not given"
            )
        self._most = most
        self.merge: int = self._processor.merge_size
        """Patches of a token in each direction."""
        self.patch_numbers: int = 3 * self._processor.temporal_patch_size * self._processor.patch_size**2
        """Numbers of a patch's pixels."""
        self.token_id: int = AutoConfig.from_pretrained(source).image_token_id
        self._counts: dict[str, int] = {}
        """Tokens of each picture by its digest."""
        # Bounded by bytes: pictures differ in size by a factor of a thousand.
        self._cache: dict[str, tuple[Tensor, Tensor]] = {}
        self._cached_bytes = 0

    @classmethod
    def of(cls, path: str, options: PixelLimits, most: int | None = None) -> "ImageReader | None":
        """The reader of a model's pictures. None if the model reads none."""
        return cls(path, options, most) if reads_pictures(path) else None

    def save(self, folder: Path) -> None:
        """Write the image processor into the folder of a model."""
        self._processor.save_pretrained(folder)

    def num_tokens(self, pictures: Pictures) -> list[int]:
        """Tokens that stand for each picture. Raises ``ValueError`` naming one that cannot be read."""
        for number, (image, digest) in enumerate(zip(pictures.data, pictures.digests, strict=True), 1):
            if digest not in self._counts:
                try:
                    width, height = _decoded(image).size
                except ValueError as error:
                    raise ValueError(f"picture {number}: {error}") from error
                patches: int = self._processor.get_number_of_image_patches(height, width, {})
                self._counts[digest] = patches // self.merge**2
        return [self._counts[digest] for digest in pictures.digests]

    def expand(self, token_ids: Sequence[int], pictures: Pictures) -> list[int]:
        """A prompt with as many placeholders for each picture as it has tokens, from one for each.

        Raises ``ValueError`` when there are more or fewer placeholders than pictures, or too many.
        """
        found, count = sum(token == self.token_id for token in token_ids), len(pictures.data)
        if self._most is not None and count > self._most:
            raise ValueError(
                f"a prompt must have at most actor_rollout_ref.rollout.limit_images={self._most} pictures, "
                f"got {count}: raise it, or drop the row"
            )
        if found != count:
            raise ValueError(
                f"the prompt must render to a placeholder for each of {count} pictures, and to no other, but "
                f"has {found}: change the chat template, or the text"
            )
        counts = iter(self.num_tokens(pictures))
        return [
            copy for token in token_ids for copy in [token] * (next(counts) if token == self.token_id else 1)
        ]

    def ranges(self, token_ids: Any, pictures: Pictures) -> list[tuple[int, int]]:
        """First place and number of the tokens of each picture in a prompt, behind which a response may be:
        a policy may sample the placeholder, which stands for no picture then.

        Raises ``ValueError`` when the prompt has not the placeholders that the pictures need.
        """
        ids, ranges, start = np.asarray(token_ids), list[tuple[int, int]](), 0
        for count in self.num_tokens(pictures):
            places = np.flatnonzero(ids[start:] == self.token_id)
            first = start + int(places[0]) if len(places) else len(ids)
            if not (ids[first : first + count] == self.token_id).all() or first + count > len(ids):
                raise ValueError(
                    f"picture {len(ranges) + 1} of a prompt needs {count} placeholders in a row, and they "
                    "are not there: something between the data and here rewrites prompts, or mixes rows up."
                )
            ranges.append((first, count))
            start = first + count
        return ranges

    def read(self, pictures: Pictures) -> tuple[Tensor, Tensor]:
        """Pixels of all patches, float32 ``[patches, numbers]``, and the grids of the pictures, int64
        ``[images, 3]``: patches in time, height and width."""
        pixels, grids = zip(*map(self._read, pictures.data, pictures.digests), strict=True)
        return torch.cat(pixels), torch.cat(grids)

    def _read(self, image: bytes, digest: str) -> tuple[Tensor, Tensor]:
        if digest not in self._cache:
            values = self._processor(images=[_decoded(image)], return_tensors="pt")
            self._cache[digest] = values["pixel_values"], values["image_grid_thw"]
            self._cached_bytes += values["pixel_values"].nbytes
            while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.pop(next(iter(self._cache)))[0].nbytes
        return self._cache[digest]


def _decoded(image: bytes) -> Image.Image:
    """The picture in RGB, on white where it is transparent, as vLLM has it; not turned as EXIF says, as in
    verl. Raises ``ValueError`` with the reason for what is not one readable picture."""
    try:
        with warnings.catch_warnings(), Image.open(BytesIO(image)) as opened:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            width, height = opened.size
            if getattr(opened, "n_frames", 1) > 1:
                raise ValueError("it is animated")
            if width * height > _MOST_PIXELS or max(width, height) > _LARGEST_RATIO * min(width, height):
                raise ValueError(
                    f"it has {width} x {height} pixels, of which {_MOST_PIXELS >> 20} million and a ratio of "
                    f"sides of {_LARGEST_RATIO} are the most"
                )
            if opened.mode.startswith(("I", "F")):
                raise ValueError(f"its numbers have more than 8 bits (mode {opened.mode}): convert it")
            if "A" not in opened.getbands() and "transparency" not in opened.info:
                return opened.convert("RGB")
            coloured = opened.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError(f"PIL cannot read it: {error}") from error


def with_pictures(
    messages: Sequence[Mapping[str, Any]], images: Any, reader: ImageReader | None, folder: Path
) -> tuple[list[dict[str, Any]], Pictures | None]:
    """The messages of a row as a chat template takes them, and the row's pictures, from the cell ``images``
    of a data file in ``folder``.

    Raises ``ValueError`` when a model without a ``reader`` gets some, when the texts have not one mark for
    each, or when one cannot be read.
    """
    has_some = images is not None and len(images) > 0
    if reader is None and not has_some:
        return [dict(message) for message in messages], None
    if reader is None:
        raise ValueError(
            "the model reads no pictures, and the row has some. Train a model with a vision tower, or drop "
            "the column"
        )
    pictures = read_pictures(images, folder) if has_some else None
    found = sum(message["content"].count(MARK) for message in messages)
    count = 0 if pictures is None else len(pictures.data)
    if found != count:
        raise ValueError(f"the prompt must have {MARK} once for each of its {count} pictures, it has {found}")
    marked = [dict(message) for message in messages]
    for message in marked:
        if MARK in message["content"]:
            message["content"] = list(_parts(message["content"]))
    return marked, pictures


def _parts(text: str) -> Iterator[dict[str, str]]:
    for piece in filter(None, re.split(f"({MARK})", text)):
        yield {"type": "image"} if piece == MARK else {"type": "text", "text": piece}


def positions(length: int, ranges: Sequence[tuple[int, int]], grids: Tensor, merge: int) -> Tensor:
    """Positions of a sequence's tokens in time, height and width (M-RoPE, arXiv:2409.12191), int64 ``[3,
    length]``: those of text count on together, those of a picture are its grid's, and text behind it goes
    on from its longest side. ``grids`` are patches, ``[images, 3]``."""
    found = torch.empty(3, length, dtype=torch.int64)
    place = start = 0
    for (first, count), (time, height, width) in zip(ranges, grids.tolist(), strict=True):
        found[:, place:first] = torch.arange(start, start + first - place)
        start += first - place
        sides = time, height // merge, width // merge
        found[:, first : first + count] = start + torch.from_numpy(np.indices(sides).reshape(3, -1))
        start += max(sides)
        place = first + count
    found[:, place:] = torch.arange(start, start + length - place)
    return found
