"""Write GSM8K (arXiv:2110.14168), grade-school word problems with a number as answer, in verl's format.

Example: python scripts/prepare_data/gsm8k.py --local_dataset_path ~/datasets/gsm8k --output_dir data/gsm8k
Without --local_dataset_path the data comes from the Hugging Face hub.
"""

import re

from conversion import Benchmark, prepare

_NUMBER = re.compile(r"-?[0-9]*\.?[0-9]+")


def extract_answer(solution: str) -> str:
    """The number after the last ``####``, without thousands separators. Raises ``ValueError`` when there is
    none."""
    _, marker, answer = solution.rpartition("####")
    number = answer.strip().replace(",", "")
    if not marker or not _NUMBER.fullmatch(number):
        raise ValueError("a solution must end in #### and a number.")
    return number


GSM8K = Benchmark(
    data_source="openai/gsm8k",
    subset="main",
    question_column="question",
    solution_column="answer",
    instruction='Let\'s think step by step and output the final answer after "####".',
    extract_answer=extract_answer,
)


def main(arguments: list[str] | None = None) -> None:
    """Convert the data set."""
    prepare(GSM8K, __doc__, arguments)


if __name__ == "__main__":
    main()
