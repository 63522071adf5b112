"""Write the task of the environment recipe: guess a secret number by its hints.

The files for RL (train, val) hold rows that differ by their index alone: the environment draws the secret.
The worked examples for SFT (sft_train, sft_val) are games of a poor player: half of the guesses are drawn
from all numbers, the others from those that the hints leave. They teach how a turn is written, and that hints
say something.

Example: python scripts/prepare_data/guess.py --output_dir data/guess
"""

import argparse
import random
from pathlib import Path

from problems import Row, conversation, rl_row, write_rows

from verl_rc.config.paths import output_folder
from verl_rc.config.user_files import import_file

GAME = import_file(Path(__file__).parents[2] / "recipes" / "environments" / "guess.py")
DATA_SOURCE = "guess"


def game(generator: random.Random, numbers: int, turns: int, informed: float) -> Row:
    """A game of one to ``turns`` guesses; a share of ``informed`` uses the hints, and none is right but the
    last."""
    secret = generator.randrange(numbers)
    low, high = 0, numbers
    messages = [("user", GAME.PROMPT)]
    for turn in range(generator.randint(1, turns)):
        uses_hints = generator.random() < informed
        guess = generator.randrange(low, high) if uses_hints else generator.randrange(numbers)
        if turn:
            last = int(messages[-1][1])
            messages.append(("user", GAME.HIGH if last > secret else GAME.LOW))
        messages.append(("assistant", str(guess)))
        if guess == secret:
            break
        low, high = (low, min(high, guess)) if guess > secret else (max(low, guess + 1), high)
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
    parser.add_argument("--informed", type=float, default=0.5, help="share of SFT guesses that use the hints")
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
            rows = [rl_row(DATA_SOURCE, "guess", GAME.PROMPT, "", (split, index)) for index in range(size)]
        else:
            rows = [game(generator, options.numbers, options.turns, options.informed) for _ in range(size)]
        path = options.output_dir / f"{split}.parquet"
        write_rows(rows, path)
        print(f"{path}: {size} games")


if __name__ == "__main__":
    main()
