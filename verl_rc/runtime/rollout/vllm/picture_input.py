"""A prompt with pictures as vLLM takes it, whose own processor has no part in a request."""

from collections.abc import Sequence
from typing import Any

from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from verl_rc.records.image_reader import ImageReader
from verl_rc.records.pictures import Pictures


def picture_input(
    reader: ImageReader, token_ids: Sequence[int], pictures: Pictures, version: int, salt: str | None
) -> Any:
    """The input of a prompt, and of what was sampled behind it, under weights of ``version``.

    vLLM keeps what the vision tower made of a picture over an update of the weights, by the hash that it is
    given: the version in it keeps a request from what older weights made.
    """
    pixels, grids = reader.read(pictures)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    values = {"pixel_values": pixels, "image_grid_thw": grids}
    ranges = [PlaceholderRange(first, count) for first, count in reader.ranges(token_ids, pictures)]
    return mm_input(
        list(token_ids),
        MultiModalKwargsItems.from_hf_inputs(values, fields),
        {"image": [f"{digest}:{version}" for digest in pictures.digests]},
        {"image": ranges},
        cache_salt=salt,
    )
