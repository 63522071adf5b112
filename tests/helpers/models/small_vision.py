"""Small models that read pictures, and pictures."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import make_tiny_model
import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import ROOT

from verl_rc.records.batches import TokenBatch, left_padded
from verl_rc.records.image_reader import ImageReader, with_pictures
from verl_rc.records.pictures import Pictures
from verl_rc.records.tokenize import encode_prompt, load_tokenizer

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_SIZES = ["--num_layers", "2", "--hidden_size", "128", "--intermediate_size", "128"]
_WITH_TORCHVISION = ROOT / "tests" / "with_torchvision"


def use_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts can import torchvision; skips the test where there is none."""
    if find_spec("torchvision") is not None:
        return
    if not (Path(sys.prefix) / "torchvision-for-tests").is_dir():
        pytest.skip("vLLM's classes of these models import torchvision, and there is none")
    monkeypatch.setenv("PYTHONPATH", f"{_WITH_TORCHVISION}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def write_model(folder: Path, family: str) -> str:
    """The folder of a random model."""
    with contextlib.redirect_stdout(io.StringIO()):
        make_tiny_model.main(["--output_dir", str(folder), "--vision", family, *_SIZES])
    return str(folder)


def picture(seed: int, height: int = 56, width: int = 56) -> bytes:
    """A PNG of noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(encoded := BytesIO(), format="PNG")
    return encoded.getvalue()


class Prompts:
    """Makes prompts of a model's folder."""

    def __init__(self, folder: str) -> None:
        reader = ImageReader.of(folder, {})
        assert reader is not None
        self.reader, self._tokenizer = reader, load_tokenizer(folder, False)

    def encode(self, text: str, *images: bytes) -> tuple[list[int], Pictures | None]:
        marked, pictures = with_pictures([{"role": "user", "content": text}], images, self.reader, Path())
        token_ids = encode_prompt(self._tokenizer, marked)
        return token_ids if pictures is None else self.reader.expand(token_ids, pictures), pictures


def batch_of(
    prompts: Sequence[tuple[list[int], Pictures | None]], responses: Sequence[list[int]]
) -> TokenBatch:
    """The prompts with their responses."""
    prompt_ids, prompt_lengths = left_padded([token_ids for token_ids, _ in prompts], 0)
    lengths = torch.tensor([len(response) for response in responses])
    padded = torch.zeros(len(responses), int(lengths.max()), dtype=torch.int64)
    for row, response in zip(padded, responses, strict=True):
        row[: len(response)] = torch.tensor(response)
    return TokenBatch(
        prompts=prompt_ids,
        prompt_lengths=prompt_lengths,
        responses=padded,
        response_lengths=lengths,
        pictures=torch.tensor([0 if one is None else one.number for _, one in prompts]),
        batch_size=[len(responses)],
    )


def log_probs_alone(
    model: Any, reader: ImageReader, prompt: list[int], pictures: Any, response: list[int]
) -> Any:
    """Of a response, by transformers' own forward pass over one row."""
    ids, given = torch.tensor([prompt + response]), dict[str, Any]()
    if pictures is not None:
        pixels, grids = reader.read(pictures)
        kinds = (ids == reader.token_id).int()
        given = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
