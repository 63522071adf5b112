"""Write the task of the environment recipe: guess a secret number by its hints.

The files for RL (train, val) hold rows that differ by their index alone: the environment draws the secret.
The worked examples for SFT (sft_train, sft_val) are games whose guesses are drawn at random: they teach how a
turn is written, not how to use the hints.

Example: python scripts/prepare_data/guess.py --output_dir data/guess
"""

import argparse
import random

from problems import Row, conversation, rl_row, write_rows

from verl_rc.config.paths import output_folder
from verl_rc.rollout.environments.guess import HIGH, LOW, PROMPT

DATA_SOURCE = "guess"


def random_game(generator: random.Random, numbers: int, turns: int) -> Row:
    """A game of one to ``turns`` random guesses, of which the last may be wrong."""
    secret = generator.randrange(numbers)
    messages = [("user", PROMPT)]
    for turn in range(generator.randint(1, turns)):
        if turn:
            messages.append(("user", HIGH if int(messages[-1][1]) > secret else LOW))
        messages.append(("assistant", str(generator.randrange(numbers))))
    return conversation(*messages)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument("--numbers", type=int, default=10, help="the secret is below; at most 10")
    parser.add_argument("--turns", type=int, default=4, help="guesses of a game")
    parser.add_argument("--num_train", type=int, default=8192, help="RL training games")
    parser.add_argument("--num_val", type=int, default=256, help="RL validation games")
    parser.add_argument("--num_sft", type=int, default=4096, help="games to train on")
    parser.add_argument("--num_sft_val", type=int, default=256, help="games that say when to stop")
    parser.add_argument("--seed", type=int, default=1, help="seed of all games")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Draw the games and write the files."""
    options = parse_arguments(arguments)
    generator = random.Random(options.seed)
    sizes = {"train": options.num_train, "val": options.num_val}
    sft_sizes = {"sft_train": options.num_sft, "sft_val": options.num_sft_val}
    for split, size in {**sizes, **sft_sizes}.items():
        if split in sizes:
            rows = [rl_row(DATA_SOURCE, "guess", PROMPT, "", (split, index)) for index in range(size)]
        else:
            rows = [random_game(generator, options.numbers, options.turns) for _ in range(size)]
        path = options.output_dir / f"{split}.parquet"
        write_rows(rows, path)
        print(f"{path}: {size} games")


if __name__ == "__main__":
    main()
