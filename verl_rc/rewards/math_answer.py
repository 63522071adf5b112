"""Competition mathematics: the answer in ``\\boxed{}`` or after ``Answer:`` is compared as mathematics, not as text."""

import logging
import re
from functools import cache
from typing import Any

_DAPO_TAIL = 300
_DAPO_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def math_answer(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the last ``\\boxed{}`` of ``solution_str`` means the same as ``ground_truth``, else 0.0.

    Equality is math-verify's: sets, intervals, fractions, units and rounding are understood. It need not come to an end, and
    has no time limit here: call it in a process that can be killed.
    """
    answer = last_boxed(solution_str)
    right = float(answer is not None and _means_the_same(answer, str(ground_truth)))
    return {"score": right, "acc": right, "pred": answer}


def dapo_math(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score +1.0 when right and -1.0 when wrong (DAPO, arXiv:2503.14476).

    The answer is what follows the last ``Answer:`` within the last 300 characters; a ``\\boxed{}`` there counts as well
    and goes first, whether or not ``Answer:`` stands before it.
    """
    tail = solution_str[-_DAPO_TAIL:]
    marked = _DAPO_ANSWER.findall(tail)
    answer = last_boxed(tail) or (marked[-1].strip().strip("$").strip() if marked else None)
    right = answer is not None and _means_the_same(answer, str(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{}`` or ``\\fbox{}`` of ``text``; None without one or when it is not closed."""
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for position in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[starts[-1] : position].strip()
    return None


def _means_the_same(answer: str, ground_truth: str) -> bool:
    if answer == ground_truth.strip():
        return True
    verifier = load_verifier()
    boxed = [f"\\boxed{{{text}}}" for text in (last_boxed(ground_truth) or ground_truth, answer)]
    expected, given = [verifier.parse(text, parsing_timeout=None, raise_on_error=False) for text in boxed]
    return bool(verifier.verify(expected, given, timeout_seconds=None, raise_on_error=False))


@cache
def load_verifier() -> Any:
    """The module math-verify; takes seconds the first time."""
    import math_verify  # noqa: PLC0415  (loads sympy, a second that only mathematics needs)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that no time limit is set
    return math_verify
