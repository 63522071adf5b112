"""A control: every response gets the score of some other, earlier response, so that scores say nothing about
responses.

bash recipes/quickstart_digits_cpu.sh reward.custom_reward_function.path=recipes/controls/shuffled_rewards.py
Validation uses the true score. Accuracy that a run gains with these rewards does not come from the reward.
"""

import random
from typing import Any

_PAST_SCORES: list[float] = []
_DRAW = random.Random(0)
_KEPT = 512


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float | str]:
    """The score of a random earlier response; ``acc`` is the true one. Validation rows keep their own
    score."""
    right = float(solution_str.strip() == ground_truth)
    if extra_info.get("split") == "val":
        return {"score": right, "acc": right}
    _PAST_SCORES.append(right)
    del _PAST_SCORES[:-_KEPT]
    return {"score": _DRAW.choice(_PAST_SCORES), "acc": right}
