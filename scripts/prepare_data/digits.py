"""Write the digit task of the quickstart: parquet files for RL (train, val) and for SFT (sft_train, sft_val).

The four files share no problem, and the space of problems (ten to the power of the length) is larger than all
of them.

Example: python scripts/prepare_data/digits.py --output_dir data/digits --task sort --length 10
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

from problems import conversation, distinct_problems, rl_row, write_rows

from verl_rc.config.paths import output_folder

DATA_SOURCE = "digits"


@dataclass(frozen=True)
class Task:
    """One kind of problem over a string of digits."""

    solve: Callable[[str], str]
    """From the digits to the answer."""
    default_length: int
    """Digits of a problem when the command line names no other number."""


TASKS = {
    "sort": Task(solve=lambda digits: "".join(sorted(digits)), default_length=10),
    "sum": Task(solve=lambda digits: str(sum(map(int, digits))), default_length=5),
}


def draw_problems(count: int, length: int, seed: int) -> list[str]:
    """``count`` different strings of ``length`` random digits (digits may repeat), in random order.

    Raises ``ValueError`` when there are fewer than twice as many such strings.
    """
    if length < 1 or 2 * count > 10**length:
        raise ValueError(
            f"--length must give at least twice as many problems as are asked for, got {count} problems of "
            f"length {length}. Raise --length, or lower --num_train, --num_val or --num_sft."
        )

    def draw(generator: random.Random) -> str:
        return "".join(generator.choices("0123456789", k=length))

    return distinct_problems(draw, count, seed)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument(
        "--task", choices=sorted(TASKS), default="sort", help="sort the digits, or add them up"
    )
    parser.add_argument(
        "--length", type=int, default=None, help="digits per problem (default: 10 to sort, 5 to add)"
    )
    parser.add_argument("--num_train", type=int, default=20480, help="RL training problems")
    parser.add_argument("--num_val", type=int, default=256, help="RL validation problems")
    parser.add_argument("--num_sft", type=int, default=8192, help="worked examples to train on")
    parser.add_argument("--num_sft_val", type=int, default=256, help="worked examples that say when to stop")
    parser.add_argument("--seed", type=int, default=1, help="seed of all problems")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Draw the problems, share them out and write the files."""
    options = parse_arguments(arguments)
    sizes = {
        "val": options.num_val,
        "sft_val": options.num_sft_val,
        "sft_train": options.num_sft,
        "train": options.num_train,
    }
    task = TASKS[options.task]
    length = options.length or task.default_length
    try:
        problems = iter(draw_problems(sum(sizes.values()), length, options.seed))
    except ValueError as error:
        raise SystemExit(f"digits.py: {error}") from None
    for split, size in sizes.items():
        selection = [next(problems) for _ in range(size)]
        if split.startswith("sft"):
            rows = [
                conversation(("user", problem), ("assistant", task.solve(problem))) for problem in selection
            ]
        else:
            rows = [
                rl_row(DATA_SOURCE, options.task, problem, task.solve(problem), (split, index))
                for index, problem in enumerate(selection)
            ]
        path = options.output_dir / f"{split}.parquet"
        write_rows(rows, path)
        print(f"{path}: {size} problems")


if __name__ == "__main__":
    main()
