"""``reward``: pairs of keys that belong together, and what a failure does."""

import pytest
from pydantic import ValidationError

from verl_rc.config.task import RewardConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"on_failure": "score"},
            "failure_score belongs to reward.on_failure=score, which needs it; got on_failure=score",
        ),
        ({"failure_score": -1.0}, "got on_failure=stop and failure_score=-1.0"),
        ({"on_failure": "score", "failure_score": float("nan")}, "finite number"),
        (
            {"reward_model": {"enable": True}},
            "model_path belongs to reward.reward_model.enable=True, which needs it; got",
        ),
        ({"reward_model": {"model_path": "folder"}}, "got enable=False and model_path=folder"),
        ({"timeout_seconds": 0}, "greater than 0"),
    ],
)
def test_pairs_belong_together(given, message) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(given)


def test_failures_stop_a_run_unless_a_score_is_given() -> None:
    assert RewardConfig().on_failure == "stop"
    assert RewardConfig.model_validate({"on_failure": "score", "failure_score": -1}).failure_score == -1.0
