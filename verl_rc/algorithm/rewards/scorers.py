"""The built-in scorers: exact text, the last answer of a conversation, grade-school and competition
mathematics."""

import logging
import re
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from verl_rc.algorithm.rewards.words import words_as_symbols


def exact_match(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the stripped ``solution_str`` equals ``ground_truth``, else 0.0."""
    answer = solution_str.strip()
    right = float(answer == str(ground_truth).strip())
    return {"score": right, "acc": right, "pred": answer}


def last_answer(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the text behind the last ``=`` of ``solution_str`` (all of it, if there is none) is
    ``ground_truth``.

    The chat template of scripts/make_tiny_model.py puts an equals sign before every turn of the policy. So
    only the last turn is judged, and a tool's answer that the policy does not give as its own is worth
    nothing.
    """
    return exact_match(solution_str.rpartition("=")[2], ground_truth)


_ANSWER = re.compile(
    r"####\s*(?:\$\s*)?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+)"
    r"((?:[.,/:]|[ \t]*[-+*×÷/^=:][ \t]*)\$?[0-9.]\S*|[eE][-+]?[0-9]+|[ \t]+[0-9]+/[0-9]+"
    r"|[ \t]*\\(?:[dt]?frac|times|cdot|div)\S*)?"
)
"""A number, and what makes another number of it, as in ``4/5``, ``4 1/5`` or ``4,5``."""


def gsm8k(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the last number written after ``####`` equals ``ground_truth`` as a number, else 0.0.

    Thousands separators and a dollar sign are ignored; a response without ``####`` is always wrong, and so is
    the beginning of a term: ``#### 4/5`` is not 4.
    Raises ``ValueError`` when ``ground_truth`` is no number.
    """
    expected = _as_number(str(ground_truth))
    if expected is None:
        raise ValueError(f"the ground truth of a GSM8K problem must be a number, got {ground_truth!r}.")
    answers = _ANSWER.findall(solution_str)
    number, rest = answers[-1] if answers else ("", "")
    answer = number + rest if rest else number.replace(",", "") or None
    right = float(not rest and answer is not None and _as_number(answer) == expected)
    return {"score": right, "acc": right, "pred": answer}


def _as_number(text: str) -> Decimal | None:
    """``text``, or the part after its ``####``, as a number; None when it is not a number."""
    try:
        number = Decimal(text.rpartition("####")[2].strip().lstrip("$").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


_DAPO_TAIL = 300
_DAPO_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_BLANKS = r"(?<!\s)(?<!\\[ ,;:!])(?<!\\(?= ))(?:\s|\\[ ,;:!])*"
"""Blanks from the first one of a run on: a search from every one would take the square of their number."""
_UNITS = r"dollars?|points?|integers?|weeks?|foot|centimeters?|(?:mm|cm|km|m|in|ft)\s*\^\s*\{?[23]\}?"
_IGNORED = re.compile(
    "|".join(
        [
            rf"{_BLANKS}(?:\\?%|\\text\{{\s*percent(?:age)?\s*\}}|\b(?:percent(?:age)?|pct)\b)",
            rf"{_BLANKS}(?:\^?\{{?\\(?:text)?degree(?![a-zA-Z])\}}?|°)",
            rf"(?<=[0-9}}]){_BLANKS}(?:{_UNITS})$",
        ]
    )
)
"""Percent signs, degree signs and units that verl's scorers ignore and math-verify, inside ``\\boxed{}``,
stumbles over."""
_LONGEST_ANSWER = 2_000
"""Characters of a mathematical answer that may be right. math-verify takes seconds for more."""
_NUMBER_AS_TEXT = re.compile(r"\\text(?:bf)?\{\s*([-+]?[0-9.,]+)\s*\}")


def math_answer(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the last ``\\boxed{}`` of ``solution_str`` means the same as ``ground_truth``, else 0.0.

    Equality is math-verify's: sets, intervals, fractions, units and rounding are understood. Percent and
    degree signs are ignored as in verl's scorers: 50 % is 50, not 0.5. Words are compared as text, whatever
    their case: ``listen`` is not ``silent``, alone or in a formula, but ``xy`` is ``yx``. It may not
    terminate and has no time limit of its own: call it in a process that can be killed. Raises ``ValueError``
    when ``ground_truth`` is neither mathematics nor words.
    """
    answer = last_boxed(solution_str)
    right = float(_means_the_same(answer, str(ground_truth)))
    return {"score": right, "acc": right, "pred": answer}


def geometry(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """0.9 for an answer that is right by ``math_answer``, and 0.1 for a thought in ``<think>`` before it: the
    reward of verl's geo3k."""
    result = math_answer(solution_str, ground_truth)
    thinks = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", solution_str, re.DOTALL) is not None
    return {**result, "score": 0.9 * result["acc"] + 0.1 * thinks}


def dapo_math(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score +1.0 when right and -1.0 when wrong (DAPO, arXiv:2503.14476).

    The answer is what follows the last ``Answer:`` within the last 300 characters, in a ``\\boxed{}`` or not;
    without ``Answer:`` it is the last ``\\boxed{}`` there. Equality and errors as in ``math_answer``.
    """
    tail = solution_str[-_DAPO_TAIL:]
    marked = _DAPO_ANSWER.findall(tail)
    answer = last_boxed(marked[-1] if marked else tail)
    if answer is None and marked:
        answer = marked[-1].strip().strip("$").strip()
    right = _means_the_same(answer, str(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` or ``\\fbox{}`` of ``text``; None without one or when it is not
    closed.

    ``\\boxed 7``, without braces, holds what comes before the next blank or dollar sign.
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?:\s*\{|\s+([^\s${]+))", text))
    if not boxes:
        return None
    if boxes[-1][1] is not None:
        return boxes[-1][1]
    start, depth = boxes[-1].end(), 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


def _means_the_same(answer: str | None, ground_truth: str) -> bool:
    """Whether ``answer`` (None: no answer) is right; parses ``ground_truth`` even without an answer, so that
    errors show."""
    if answer == ground_truth.strip() != "":
        return True
    verifier = load_verifier()

    def parsed(text: str) -> list[Any]:
        expression: list[Any] = verifier.parse(
            f"\\boxed{{{words_as_symbols(_plain(text))}}}",
            [verifier.LatexExtractionConfig()],
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        return expression

    expected = parsed(last_boxed(ground_truth) or ground_truth.strip())
    if all(isinstance(part, str) for part in expected):
        raise ValueError(
            "the ground truth of a math problem must be something math-verify can read as mathematics, or "
            f"words, got {ground_truth!r}."
        )
    if answer is None or len(answer) > _LONGEST_ANSWER:
        return False
    return bool(verifier.verify(expected, parsed(answer), timeout_seconds=None, raise_on_error=False))


def _plain(text: str) -> str:
    """``text`` without units, percent and degree signs, which do not change its meaning."""
    return _IGNORED.sub("", _NUMBER_AS_TEXT.sub(r"\1", text.replace("~", " ").rstrip(" .\\")))


@cache
def load_verifier() -> Any:
    """The module math-verify; takes seconds the first time."""
    import math_verify  # noqa: PLC0415  (loads sympy, a second that only mathematics needs)

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns at every call that no time limit is set
    return math_verify
