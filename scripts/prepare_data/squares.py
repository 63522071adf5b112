"""Write a task with pictures: how many squares of a colour are in one? Files as those of digits.py.

A picture has 4 x 4 cells, 0 to 5 of them with a square of each of three colours; the question names a colour,
and the answer is a digit. The files share no picture but by chance.

Example: python scripts/prepare_data/squares.py --output_dir data/squares
"""

import argparse
import random
from io import BytesIO
from typing import Any

from PIL import Image, ImageDraw
from problems import conversation, rl_row, write_rows

from verl_rc.config.paths import output_folder

DATA_SOURCE = "digits"
"""A digit is compared as one of sorted digits is."""
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (40, 60, 230)}
CELLS, CELL, MARGIN = 4, 14, 2
"""Cells in each direction, and pixels of one and around its square."""


def draw(generator: random.Random, most: int) -> tuple[str, str, bytes]:
    """A question, its answer and the picture, a PNG."""
    counts = {name: generator.randint(0, most) for name in COLOURS}
    cells = [(x * CELL, y * CELL) for x in range(CELLS) for y in range(CELLS)]
    places = iter(generator.sample(cells, sum(counts.values())))
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (235, 235, 235))
    drawing = ImageDraw.Draw(image)
    for name, colour in COLOURS.items():
        for _ in range(counts[name]):
            x, y = next(places)
            ends = (x + CELL - MARGIN - 1, y + CELL - MARGIN - 1)
            drawing.rectangle((x + MARGIN, y + MARGIN, *ends), fill=colour)
    image.save(encoded := BytesIO(), format="PNG")
    asked = generator.choice(list(COLOURS))
    return f"<image>{asked}", str(counts[asked]), encoded.getvalue()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument("--most", type=int, default=5, help="most squares of a colour")
    parser.add_argument("--num_train", type=int, default=20480, help="RL training problems")
    parser.add_argument("--num_val", type=int, default=256, help="RL validation problems")
    parser.add_argument("--num_sft", type=int, default=8192, help="worked examples to train on")
    parser.add_argument("--num_sft_val", type=int, default=256, help="worked examples that say when to stop")
    parser.add_argument("--seed", type=int, default=1, help="seed of all problems")
    options = parser.parse_args(arguments)
    if not 0 < options.most * len(COLOURS) <= CELLS**2:
        parser.error(f"--most must be 1 to {CELLS**2 // len(COLOURS)}, got {options.most}.")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Draw the problems, share them out and write the files."""
    options = parse_arguments(arguments)
    generator = random.Random(options.seed)
    sizes = {
        "val": options.num_val,
        "sft_val": options.num_sft_val,
        "sft_train": options.num_sft,
        "train": options.num_train,
    }
    for split, size in sizes.items():
        rows: list[dict[str, Any]] = []
        for index in range(size):
            question, answer, image = draw(generator, options.most)
            row = (
                conversation(("user", question), ("assistant", answer))
                if split.startswith("sft")
                else rl_row(DATA_SOURCE, "count", question, answer, (split, index))
            )
            rows.append({**row, "images": [{"bytes": image, "path": None}]})
        path = options.output_dir / f"{split}.parquet"
        write_rows(rows, path)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
