"""Write the task of the research recipe: add up facts that must be searched for, with a calculator.

A question is "b+e+7"; every row has its own facts, {"b": 2, "e": 4, ...}, so that they cannot be learnt.
The files for RL (train, val) hold questions, facts and sums. The worked examples for SFT (sft_train, sft_val)
are conversations of a poor player, one of whose four turns is drawn at random; SFT learns the last turn of
each, so they end anywhere.

Example: python scripts/prepare_data/research.py --output_dir data/research
"""

import argparse
import random

from problems import Row, conversation, rl_row, write_rows

from verl_rc.config.paths import output_folder

DATA_SOURCE = "research"
NAMES = "abcdefghij"


def draw(generator: random.Random, names: int, largest: int) -> tuple[str, dict[str, int], str]:
    """A question of one to ``names`` names and a number, the facts of all names, up to ``largest``, and the
    sum."""
    facts = {name: generator.randint(1, largest) for name in NAMES}
    asked = generator.sample(NAMES, generator.randint(1, names))
    number = generator.randint(1, 9)
    return "+".join([*asked, str(number)]), facts, str(sum(facts[name] for name in asked) + number)


def played(generator: random.Random, options: argparse.Namespace) -> Row:
    """A conversation; a share of its turns (``--informed``) is what the question asks for."""
    question, facts, _ = draw(generator, options.names, options.largest)
    *asked, number = question.split("+")
    messages, found, total = [("user", question)], dict[str, str](), ""
    for _ in range(options.turns):
        missing = [name for name in asked if name not in found]
        known = [*found.values(), number]
        if generator.random() >= options.informed:
            text = random_turn(generator, known)
        else:
            text = missing[0] if missing else total or "+".join(known)
        messages.append(("assistant", text))
        if text.isdecimal():
            break
        if text.isalpha():
            content = str(facts[text])
            if text in missing:
                found[text] = content
        else:
            content = str(sum(map(int, text.split("+"))))
            if not missing:
                total = content
        messages.append(("tool", content))
    ends = [place for place, (role, _) in enumerate(messages) if role == "assistant"]
    return conversation(*messages[: generator.choice(ends) + 1])


def random_turn(generator: random.Random, known: list[str]) -> str:
    """A search, a sum of what is known, or an answer."""
    kind = generator.randrange(3)
    if kind == 0:
        return generator.choice(NAMES)
    if kind == 1 and len(known) > 1:
        return "+".join(generator.sample(known, generator.randint(2, len(known))))
    return str(generator.randint(1, 99))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument("--names", type=int, default=4, help="most names of a question; at most 10")
    parser.add_argument("--largest", type=int, default=9, help="largest number that a name stands for")
    parser.add_argument("--turns", type=int, default=7, help="most turns of a conversation")
    parser.add_argument("--informed", type=float, default=0.75, help="share of SFT turns that are right")
    parser.add_argument("--num_train", type=int, default=8192, help="RL training questions")
    parser.add_argument("--num_val", type=int, default=256, help="RL validation questions")
    parser.add_argument("--num_sft", type=int, default=16384, help="conversations to train on")
    parser.add_argument("--num_sft_val", type=int, default=256, help="conversations that say when to stop")
    parser.add_argument("--seed", type=int, default=1, help="seed of all questions")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Draw the questions and write the files."""
    options = parse_arguments(arguments)
    generator = random.Random(options.seed)
    for split, size in {"train": options.num_train, "val": options.num_val}.items():
        rows = []
        for index in range(size):
            question, facts, answer = draw(generator, options.names, options.largest)
            row = rl_row(DATA_SOURCE, "research", question, answer, (split, index))
            rows.append({**row, "extra_info": {**row["extra_info"], "facts": facts}})
        write_rows(rows, options.output_dir / f"{split}.parquet")
    for split, size in {"sft_train": options.num_sft, "sft_val": options.num_sft_val}.items():
        games = [played(generator, options) for _ in range(size)]
        write_rows(games, options.output_dir / f"{split}.parquet")


if __name__ == "__main__":
    main()
