"""Right when the response is the expected text, up to blanks at its ends."""

from typing import Any


def exact_match(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when ``solution_str`` without blanks at its ends equals ``ground_truth``, else 0.0."""
    answer = solution_str.strip()
    right = float(answer == str(ground_truth).strip())
    return {"score": right, "acc": right, "pred": answer}
