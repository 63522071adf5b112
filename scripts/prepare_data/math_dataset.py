"""Write MATH (arXiv:2103.03874), competition problems whose solutions box the answer, in verl's format.

Example: python scripts/prepare_data/math_dataset.py --local_dataset_path ~/datasets/MATH-lighteval
--output_dir data/math

Without --local_dataset_path the data comes from the Hugging Face hub. The file is not called math.py: as a
script it would stand before the standard library's module of that name.
"""

import re

from conversion import Benchmark, prepare

_BOX = re.compile(r"\\(?:boxed|fbox)")


def extract_answer(solution: str) -> str:
    r"""What stands in the last ``\boxed{}``, or after a ``\boxed`` without braces up to the end of the
    formula.

    Raises ``ValueError`` when there is none, it is empty, or its braces do not close.
    """
    boxes = list(_BOX.finditer(solution))
    after = solution[boxes[-1].end() :].lstrip() if boxes else ""
    answer = leading_group(after) if after.startswith("{") else after.partition("$")[0]
    if not answer.strip():
        raise ValueError(r"a solution must hold a \boxed{answer} whose braces close.")
    return answer.strip()


def leading_group(text: str) -> str:
    """The content of the braces that ``text`` begins with; empty when they do not close."""
    depth = 0
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[1:position]
    return ""


MATH = Benchmark(
    data_source="DigitalLearningGmbH/MATH-lighteval",
    subset="default",
    question_column="problem",
    solution_column="solution",
    instruction=r"Let's think step by step and output the final answer within \boxed{}.",
    extract_answer=extract_answer,
)


def main(arguments: list[str] | None = None) -> None:
    """Convert the data set."""
    prepare(MATH, __doc__, arguments)


if __name__ == "__main__":
    main()
