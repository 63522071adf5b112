"""Pictures of prompts: one object in a process, placeholders, positions, and what is refused."""

import gc
import pickle
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from ragged_rows import ragged
from small_vision import FAMILIES, Prompts, batch_of, picture, write_model
from transformers import AutoModelForImageTextToText

from verl_rc.config.task import DataConfig
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.dataset import PromptDataset, PromptRow
from verl_rc.records.fingerprints import (
    TokensChangedError,
    fingerprints_of_samples,
    require_sampled_tokens,
)
from verl_rc.records.groups import Group, GroupSample, pack, unpack
from verl_rc.records.image_reader import ImageReader, positions
from verl_rc.records.parts import Part, Sample
from verl_rc.records.pictures import Pictures, image_bytes
from verl_rc.records.ragged import Ragged
from verl_rc.records.rollout_batch import build_rollout_batch
from verl_rc.records.tokenize import encode_prompt, load_tokenizer, read_worked_examples
from verl_rc.runtime.rollout.sampling import GenerationRequest

SMALL, WIDE = picture(1), picture(2, 56, 84)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("vision"), "qwen3_vl")


def test_equal_pictures_are_one_object_that_many_requests_send_once() -> None:
    image = picture(3, 280, 280)
    one = Pictures([image])
    assert Pictures([bytes(bytearray(image))]) is one
    assert Pictures([image, image]) is not one
    requests = [GenerationRequest([1], seed, pictures=Pictures([image])) for seed in range(8)]
    sent = pickle.dumps(requests)
    assert len(image) < len(sent) < len(image) + 8 * 500
    assert all(request.pictures is one for request in pickle.loads(sent))


def test_a_number_is_known_while_something_holds_its_pictures() -> None:
    number = Pictures([b"held by nobody"]).number
    gc.collect()
    with pytest.raises(LookupError, match="a row must be held, with its pictures"):
        Pictures.known(number)
    held = Pictures([b"held"])
    assert Pictures.known(held.number) is held


def test_a_batch_takes_its_pictures_to_a_rank_once() -> None:
    two = Pictures([SMALL]), Pictures([WIDE, SMALL])
    rows = [([5], two[0]), ([5], None), ([5], two[1]), ([5], two[0])]
    arrived = pickle.loads(pickle.dumps(ragged(batch_of(rows, [[7]] * 4), [0, 1, 3])))
    assert arrived.images == (two[0],)
    assert arrived.padded([2, 1]).pictures.tolist() == [two[0].number, 0]


def test_a_checkpoint_of_running_samples_has_no_picture() -> None:
    sizes = []
    for side in (28, 1400):
        pictures = Pictures([picture(3, side, side)])
        row = PromptRow(0, [5], [], "digits", "1", {}, pictures=pictures)
        sample = Sample(0, [Part(torch.tensor([7], dtype=torch.int32), torch.tensor([-1.0]), 0)])
        group = Group(0, row, 0, 1, 0, [GroupSample(0, 0, [5], replace(sample, pictures=pictures.number))])
        saved = pack([group])
        assert saved["groups"][0]["samples"][0]["pictures"] == pictures.number
        assert unpack(saved, lambda _, row=row: row)[0].samples[0].response.pictures == pictures.number
        with pytest.raises(ValueError, match=r"the tokens and pictures that were sampled from"):
            unpack(saved, lambda _, row=row: replace(row, pictures=Pictures([SMALL])))
        sizes.append(len(pickle.dumps(saved)))
    assert abs(sizes[0] - sizes[1]) < 16


@pytest.mark.parametrize("form", ["bytes", "mapping", "path", "relative", "url", "PIL"])
def test_every_form_of_a_cell(form: str, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(SMALL)
    cell: Any = {
        "bytes": SMALL,
        "mapping": {"bytes": SMALL, "path": "nowhere"},
        "path": {"bytes": None, "path": str(tmp_path / "one.png")},
        "relative": "one.png",
        "url": f"file://{tmp_path / 'one.png'}",
        "PIL": Image.open(BytesIO(SMALL)),
    }[form]
    found = image_bytes(cell, tmp_path)
    assert found == SMALL or form == "PIL"
    assert Image.open(BytesIO(found)).tobytes() == Image.open(BytesIO(SMALL)).tobytes()


def test_placeholders(folder: str) -> None:
    """A token for each 28 x 28 pixels: 4 and 6; the prompt has two for each picture around them, and 14 bytes
    of text."""
    made = Prompts(folder)
    reader = made.reader
    assert reader.num_tokens(Pictures([SMALL, WIDE])) == [4, 6]
    token_ids, pictures = made.encode("<image>and<image>: which?", SMALL, WIDE)
    assert len(token_ids) == 26
    assert pictures is not None
    assert reader.ranges(token_ids, pictures) == [(1, 4), (10, 6)]
    # a placeholder behind the prompt is the policy's
    assert reader.ranges([*token_ids, reader.token_id], pictures) == [(1, 4), (10, 6)]
    pixels, grids = reader.read(pictures)
    assert grids.tolist() == [[1, 4, 4], [1, 4, 6]]
    assert pixels.shape == (16 + 24, 3 * 2 * 14 * 14)


def test_pixels_have_limits(folder: str) -> None:
    limited = ImageReader(folder, {"max_pixels": 28 * 28 * 4})
    large = Pictures([picture(1, 280, 280)])
    assert limited.num_tokens(large) == [4]
    assert ImageReader(folder, {}).num_tokens(large) == [64]
    with pytest.raises(ValueError, match="must leave min_pixels <= max_pixels, got 100000 and 1000"):
        ImageReader(folder, {"min_pixels": 100_000, "max_pixels": 1000})
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        DataConfig(
            train_files=["a"],
            val_files=["a"],
            mm_processor_kwargs={"max_pixels": 0},
            seed=1,
            gen_batch_size=1,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    made = Prompts(write_model(tmp_path, family))
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    token_ids, pictures = made.encode("<image>and<image>: which?", SMALL, WIDE)
    assert pictures is not None
    _, grids = made.reader.read(pictures)
    ids = torch.tensor([token_ids])
    kinds = (ids == made.reader.token_id).int()
    expected, _ = model.base_model.get_rope_index(ids, kinds, image_grid_thw=grids)
    ranges = made.reader.ranges(token_ids, pictures)
    found = positions(len(token_ids), ranges, grids, made.reader.merge)
    assert torch.equal(found, expected[:, 0])
    assert found[:, 5].tolist() == [3, 3, 3]  # a grid of 2 x 2 tokens from 1 on, then text at 1 + 2


def test_a_row_with_another_rows_picture_is_seen() -> None:
    """The batch has the pictures of the data, and the fingerprints those that the engine read."""
    one, other = Pictures([SMALL]), Pictures([WIDE])
    part = Part(torch.tensor([7], dtype=torch.int32), torch.tensor([-1.0]), 0)
    samples = [Sample(0, [part], pictures=one.number), Sample(1, [part], pictures=one.number)]

    def batch(*pictures: Pictures | None) -> Ragged[RolloutBatch]:
        return build_rollout_batch([[5], [5]], [0, 1], samples, pictures=pictures)

    expected = fingerprints_of_samples([[5], [5]], samples)
    require_sampled_tokens(expected, batch(one, one))
    for wrong in (other, None):
        with pytest.raises(TokensChangedError, match=r"the first are \[1\]"):
            require_sampled_tokens(expected, batch(one, wrong))


def rows_file(folder: Path, *rows: tuple[str, Any]) -> str:
    table = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "digits",
            "reward_model": {"ground_truth": "1"},
            "images": images,
        }
        for text, images in rows
    ]
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    return str(path)


def dataset_of(
    path: str, folder: str, with_reader: bool = True, most: int | None = None, **options: Any
) -> PromptDataset:
    given = {
        "train_files": [path],
        "val_files": [path],
        "seed": 1,
        "gen_batch_size": 1,
        "max_prompt_length": 40,
    }
    config = DataConfig(**{**given, **options})
    reader = ImageReader.of(folder, {}, most) if with_reader else None
    return PromptDataset([path], load_tokenizer(folder, False), config, reader=reader)


def cells(*images: bytes) -> list[dict[str, Any]]:
    return [{"bytes": image, "path": None} for image in images]


def test_rows_with_and_without_pictures(folder: str, tmp_path: Path) -> None:
    path = rows_file(tmp_path, ("<image>red", cells(SMALL)), ("red", None), ("red", []))
    first, second, third = (
        dataset_of(path, folder)[0],
        dataset_of(path, folder)[1],
        dataset_of(path, folder)[2],
    )
    assert first.pictures is Pictures([SMALL])
    assert first.messages == [{"role": "user", "content": "<image>red"}]
    assert len(first.prompt_token_ids) == 1 + 4 + 1 + 3 + 1
    assert second.pictures is third.pictures is None
    assert second.prompt_token_ids == third.prompt_token_ids


def animation() -> bytes:
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "green")]
    frames[0].save(encoded := BytesIO(), format="GIF", save_all=True, append_images=frames[1:])
    return encoded.getvalue()


def sixteen_bits() -> bytes:
    Image.fromarray(np.full((28, 28), 1000, np.uint16)).save(encoded := BytesIO(), format="PNG")
    return encoded.getvalue()


def strip() -> bytes:
    Image.new("RGB", (2, 500)).save(encoded := BytesIO(), format="PNG")
    return encoded.getvalue()


@pytest.mark.parametrize(
    ("text", "images", "said"),
    [
        ("red", cells(SMALL), "row 0 of .*<image> once for each of its 1 pictures, it has 0"),
        ("<image><image>", cells(SMALL), "for each of its 1 pictures, it has 2"),
        (
            "<image><|image_pad|>",
            cells(SMALL),
            "a placeholder for each of 1 pictures, and to no other, but has 2",
        ),
        ("<image>", cells(b"text"), "row 0 of .*picture 1: PIL cannot read it"),
        ("<image><image>", cells(SMALL, animation()), "picture 2: it is animated"),
        ("<image>", cells(strip()), "picture 1: it has 2 x 500 pixels, .* a ratio of sides of 200"),
        ("<image>", [{"bytes": None, "path": "nowhere.png"}], "picture 1: .*nowhere.png"),
        ("<image>how many?", None, "for each of its 0 pictures, it has 1"),
        ("<image>how many?", [], "for each of its 0 pictures, it has 1"),
        (
            "<image>",
            cells(SMALL[: len(SMALL) // 2]),
            "picture 1: PIL cannot read it: image file is truncated",
        ),
        ("<image>", cells(sixteen_bits()), "picture 1: its numbers have more than 8 bits"),
        ("<image>", [{"bytes": SMALL, "max_pixels": 784}], "'max_pixels' of a single picture is not read"),
        ("<image>" * 3, cells(SMALL, SMALL, SMALL), "at most .*limit_images=2 pictures, got 3"),
        ("<image>" + "x" * 40, cells(SMALL), "must have at most data.max_prompt_length=40 tokens, got 47"),
    ],
)
def test_a_row_that_is_refused(
    text: str, images: list[dict[str, Any]], said: str, folder: str, tmp_path: Path
) -> None:
    """Also a long one, of which a placeholder could be cut."""
    with pytest.raises(ValueError, match=said):
        dataset_of(rows_file(tmp_path, (text, images)), folder, most=2, truncation="left")


def test_a_text_model_with_pictures_is_refused(folder: str, tmp_path: Path) -> None:
    path = rows_file(tmp_path, ("red", None), ("<image>red", cells(SMALL)))
    with pytest.raises(ValueError, match=r"'images' in row 1 of .* is refused"):
        dataset_of(path, folder, with_reader=False)


def test_another_column_is_refused_for_a_text_model_too(folder: str, tmp_path: Path) -> None:
    path = rows_file(tmp_path, ("red", None), ("<image>red", cells(SMALL)))
    renamed = pq.read_table(path).rename_columns(["prompt", "data_source", "reward_model", "photos"])
    pq.write_table(renamed, path)
    with pytest.raises(ValueError, match=r"row 1 of .*the model reads no pictures, and the row has some"):
        dataset_of(path, folder, with_reader=False, image_key="photos")


def test_other_pictures_are_other_data(folder: str, tmp_path: Path) -> None:
    """Also where their texts are the same."""
    found = set()
    for image in (SMALL, WIDE):
        (tmp_path / str(len(found))).mkdir()
        found.add(
            dataset_of(
                rows_file(tmp_path / str(len(found)), ("<image>red", cells(image))), folder
            ).fingerprint()
        )
    assert len(found) == 2


def test_what_is_transparent_lies_on_white(folder: str) -> None:
    """A black line: on black it would be gone."""
    drawing = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    drawing.paste((0, 0, 0, 255), (10, 10, 46, 14))
    drawing.save(encoded := BytesIO(), format="PNG")
    white = Image.new("RGB", (56, 56), "white")
    white.paste((0, 0, 0), (10, 10, 46, 14))
    white.save(expected := BytesIO(), format="PNG")
    reader = Prompts(folder).reader
    found, wanted = (reader.read(Pictures([one.getvalue()]))[0] for one in (encoded, expected))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "CMYK"])
def test_every_mode_becomes_rgb(mode: str, folder: str) -> None:
    image = Image.open(BytesIO(SMALL)).convert(mode)
    image.save(encoded := BytesIO(), format="TIFF" if mode == "CMYK" else "PNG")
    pixels, _ = Prompts(folder).reader.read(Pictures([encoded.getvalue()]))
    image.convert("RGB").save(again := BytesIO(), format="PNG")
    expected, _ = Prompts(folder).reader.read(Pictures([again.getvalue()]))
    assert torch.equal(pixels, expected)


def test_a_template_that_drops_the_text_beside_a_picture_is_refused(folder: str) -> None:
    tokenizer = load_tokenizer(folder, False)
    kept = "{{ part['text'] }}"
    assert kept in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(kept, "")
    marked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]
    with pytest.raises(ValueError, match=r"must render every message of a prompt, but leaves out .*how many"):
        encode_prompt(tokenizer, marked)


def test_an_answer_has_no_picture(folder: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "show red"}, {"role": "assistant", "content": "<image>"}]
    path = tmp_path / "sft.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": said, "images": cells(SMALL)}]), path)
    reader = ImageReader.of(folder, {})
    with pytest.raises(ValueError, match=r"row 0 of .*: an answer has text alone"):
        read_worked_examples([str(path)], "messages", load_tokenizer(folder, False), 64, "images", reader)
