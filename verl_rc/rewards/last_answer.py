"""Right when what follows the last equals sign is the expected text: for conversations whose turns begin with one."""

from typing import Any

from verl_rc.rewards.exact_match import exact_match


def last_answer(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 when the text behind the last ``=`` of ``solution_str`` (all of it, if there is none) is ``ground_truth``.

    The chat template of scripts/make_tiny_model.py puts an equals sign before every turn of the policy. So only the last turn
    is judged, and a tool's answer that the policy does not give as its own is worth nothing.
    """
    return exact_match(solution_str.rpartition("=")[2], ground_truth)
