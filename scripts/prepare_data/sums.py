"""Write the task of the tools recipe: sums that a tiny model cannot add up, but can copy into a call of the
calculator.

A problem is "37+58+4+91". The files for RL (train, val) hold problems and their sums. Of the worked examples
for SFT (sft_train), a share teaches the call <tool>37+58+4+91</tool> and the answer that follows the tool's;
the rest teaches to answer at once. sft_val holds calls only, so its accuracy is that of copying. The four
files share no problem.

Example: python scripts/prepare_data/sums.py --output_dir data/sums --terms 4
"""

import argparse
import random

from problems import Row, conversation, distinct_problems, rl_row, write_rows

from verl_rc.config.paths import output_folder

DATA_SOURCE = "sums"


def draw_problems(count: int, terms: int, largest: int, seed: int) -> list[str]:
    """``count`` different sums of ``terms`` numbers from 1 to ``largest``, in random order.

    Raises ``ValueError`` when there are fewer than twice as many.
    """
    if 2 * count > largest**terms:
        raise ValueError(
            f"--terms and --largest must give at least twice as many problems as are asked for, got {count} "
            f"problems and {largest}**{terms} sums. Raise them, or lower --num_train, --num_val or --num_sft."
        )

    def draw(generator: random.Random) -> str:
        return "+".join(str(generator.randint(1, largest)) for _ in range(terms))

    return distinct_problems(draw, count, seed)


def solve(problem: str) -> str:
    """The sum."""
    return str(sum(map(int, problem.split("+"))))


def call_row(problem: str) -> Row:
    """A worked example that ends with the call of the tool."""
    return conversation(("user", problem), ("assistant", f"<tool>{problem}</tool>"))


def sft_rows(problem: str, with_tool: bool) -> list[Row]:
    """Worked examples of one problem: the call, and the answer after the tool's; or the answer at once."""
    if not with_tool:
        return [conversation(("user", problem), ("assistant", solve(problem)))]
    call = call_row(problem)
    turns = [(message["role"], message["content"]) for message in call["messages"]]
    return [call, conversation(*turns, ("tool", solve(problem)), ("assistant", solve(problem)))]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument("--terms", type=int, default=4, help="numbers of one sum")
    parser.add_argument("--largest", type=int, default=99, help="largest number of a sum")
    parser.add_argument(
        "--tool_share", type=float, default=0.5, help="share of SFT problems that are solved with the tool"
    )
    parser.add_argument("--num_train", type=int, default=8192, help="RL training problems")
    parser.add_argument("--num_val", type=int, default=256, help="RL validation problems")
    parser.add_argument(
        "--num_sft", type=int, default=8192, help="problems of the worked examples to train on"
    )
    parser.add_argument(
        "--num_sft_val", type=int, default=256, help="problems of the calls that say when to stop"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all problems")
    options = parser.parse_args(arguments)
    if options.terms < 2 or options.largest < 1 or not 0 <= options.tool_share <= 1:
        parser.error(
            "--terms must be at least 2, --largest at least 1 and --tool_share between 0 and 1, got "
            f"{options.terms}, {options.largest}, {options.tool_share}."
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    """Draw the problems, share them out and write the files."""
    options = parse_arguments(arguments)
    sizes = {
        "val": options.num_val,
        "sft_val": options.num_sft_val,
        "sft_train": options.num_sft,
        "train": options.num_train,
    }
    try:
        problems = iter(draw_problems(sum(sizes.values()), options.terms, options.largest, options.seed))
    except ValueError as error:
        raise SystemExit(f"sums.py: {error}") from None
    for split, size in sizes.items():
        selection = [next(problems) for _ in range(size)]
        if split == "sft_val":
            rows = [call_row(problem) for problem in selection]
        elif split == "sft_train":
            with_tool = round(options.tool_share * size)
            rows = [
                row for index, problem in enumerate(selection) for row in sft_rows(problem, index < with_tool)
            ]
        else:
            rows = [
                rl_row(DATA_SOURCE, "sum", problem, solve(problem), (split, index))
                for index, problem in enumerate(selection)
            ]
        path = options.output_dir / f"{split}.parquet"
        write_rows(rows, path)
        print(f"{path}: {len(rows)} rows of {size} problems")


if __name__ == "__main__":
    main()
