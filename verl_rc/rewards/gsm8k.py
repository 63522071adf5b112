"""Grade-school mathematics (GSM8K, arXiv:2110.14168): the answer is the number after ``####``."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

_ANSWER = re.compile(r"####\s*\$?\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)")


def gsm8k(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the last number written after ``####`` equals ``ground_truth`` as a number, else 0.0.

    Thousands separators and a dollar sign are ignored; a response without ``####`` is wrong whatever numbers it holds.
    Raises ``ValueError`` when ``ground_truth`` is no number.
    """
    expected = _as_number(str(ground_truth))
    if expected is None:
        raise ValueError(f"the ground truth of a GSM8K problem must be a number, got {ground_truth!r}.")
    found = _ANSWER.findall(solution_str)
    answer = found[-1].replace(",", "") if found else None
    right = float(answer is not None and _as_number(answer) == expected)
    return {"score": right, "acc": right, "pred": answer}


def _as_number(text: str) -> Decimal | None:
    """The number that ``text`` is, or that follows its ``####``; None when it is none."""
    try:
        number = Decimal(text.rpartition("####")[2].strip().lstrip("$").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
