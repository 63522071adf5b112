"""Pictures in a packed forward pass: their pixels, and which tokens they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.records.image_reader import ImageReader, positions
from verl_rc.records.pictures import Pictures


@dataclass(frozen=True)
class PackedPictures:
    """The pictures of packed sequences; some of their tokens are computed, see ``ComputedOnce``."""

    token_ids: Tensor
    """int64 ``[N]``: all packed tokens."""
    lengths: Sequence[int]
    """Tokens of each of S sequences."""
    of_sequences: Sequence[Pictures | None]
    """The pictures of each. None for those without."""
    sources: Tensor | None = None
    """int64 ``[M]``: places of the computed tokens among the N. None if all are."""
    places: Tensor | None = None
    """int64 ``[N]``: which of the M stands for each token; with ``sources``."""


@dataclass(frozen=True)
class _Image:
    first: int
    """Place of its first token among the N."""
    num_tokens: int
    pixels: Tensor
    grid: Tensor


@dataclass(frozen=True)
class _Inputs:
    """What a vision-language model takes beside token ids."""

    pixels: Tensor
    grids: Tensor
    position_ids: Tensor
    """int64 ``[3, 1, M]``."""
    is_picture: Tensor
    """bool ``[1, M, 1]``."""


def pictures_by_place(model: nn.Module, reader: ImageReader) -> nn.Module:
    """``model``, whose forward pass over packed tokens takes an argument ``pictures``.

    Tokens are those of a picture by their place: a policy may sample the placeholder, which transformers
    would take for a picture that is not there. Without ``pictures`` a picture of one token goes through the
    tower, and nowhere else: under FSDP all ranks have to enter it.
    """
    causal_lm: Any = model
    body = causal_lm.base_model
    plain, find, current = body.forward, body.get_placeholder_mask, list[Tensor]()

    def forward(*args: Any, pictures: PackedPictures | None = None, **inputs: Any) -> Any:
        if inputs.get("packed_layout") is None:
            return plain(*args, **inputs)
        given = _inputs(reader, inputs["position_ids"], pictures)
        current[:] = [given.is_picture]
        vision = {"pixel_values": given.pixels, "image_grid_thw": given.grids}
        try:
            return plain(*args, **{**inputs, **vision, "position_ids": given.position_ids})
        finally:
            current.clear()

    def placeholders(*args: Any, **inputs: Any) -> Any:
        return (current[0], torch.zeros_like(current[0])) if current else find(*args, **inputs)

    body.forward, body.get_placeholder_mask = forward, placeholders
    return model


def freeze_tower(model: nn.Module) -> None:
    """Train no weight of the vision tower, if ``model`` has one, nor of what merges its patches."""
    tower = getattr(getattr(model, "base_model", None), "visual", None)
    if isinstance(tower, nn.Module):
        tower.requires_grad_(False)


def require_frozen_tower(model: nn.Module) -> None:
    """Raise ``ValueError`` when adapters train weights of the vision tower."""
    trained = [
        name for name, weight in model.named_parameters() if weight.requires_grad and ".visual." in name
    ]
    if trained:
        raise ValueError(
            f"the vision tower is frozen, and adapters would train it ({trained[0]}): pass "
            "actor_rollout_ref.model.exclude_modules='.*visual.*', or "
            "actor_rollout_ref.actor.freeze_vision_tower=False"
        )


def _inputs(reader: ImageReader, position_ids: Tensor, pictures: PackedPictures | None) -> _Inputs:
    """``position_ids`` ``[1, M]`` are those of text."""
    device = position_ids.device
    images, places = list[_Image](), position_ids[None].expand(3, -1, -1)
    is_picture = torch.zeros(position_ids.shape[1], dtype=torch.bool)
    if pictures is not None:
        images, of_all = _read(reader, pictures)
        every = torch.arange(of_all.shape[1])
        sources = every if pictures.sources is None else pictures.sources.cpu()
        stands = every if pictures.places is None else pictures.places.cpu()
        # A shared picture is computed for the first of its rows alone.
        computed = [(int(stands[image.first]), image) for image in images]
        computed = [(place, image) for place, image in computed if sources[place] == image.first]
        images = [image for _, image in sorted(computed, key=lambda pair: pair[0])]
        for place, image in computed:
            is_picture[place : place + image.num_tokens] = True
        places = of_all[:, None, sources].to(device)
    if not images:
        nothing = torch.zeros(reader.merge**2, reader.patch_numbers)
        images = [_Image(0, 0, nothing, torch.tensor([1, reader.merge, reader.merge]))]
    return _Inputs(
        torch.cat([image.pixels for image in images]).to(device),
        torch.stack([image.grid for image in images]).to(device),
        places,
        is_picture[None, :, None].to(device),
    )


def _read(reader: ImageReader, pictures: PackedPictures) -> tuple[list[_Image], Tensor]:
    """All pictures, and the positions ``[3, N]`` of all tokens."""
    images, of_sequences, begin = list[_Image](), list[Tensor](), 0
    ids = pictures.token_ids.cpu().numpy()
    for length, one in zip(pictures.lengths, pictures.of_sequences, strict=True):
        ranges, grids = list[tuple[int, int]](), torch.zeros(0, 3, dtype=torch.int64)
        if one is not None:
            ranges = reader.ranges(ids[begin : begin + length], one)
            pixels, grids = reader.read(one)
            pieces = pixels.split(grids.prod(-1).tolist())
            images += [
                _Image(begin + first, count, piece, grid)
                for (first, count), piece, grid in zip(ranges, pieces, grids, strict=True)
            ]
        of_sequences.append(positions(length, ranges, grids, reader.merge))
        begin += length
    return images, torch.cat(of_sequences, dim=1)
