"""``reward``: pairs of keys that belong together, and what a failure does."""

import pytest
from pydantic import ValidationError

from verl_rc.config.task import RewardConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"failure_score": float("nan")}, "finite number"),
        (
            {"reward_model": {"enable": True}},
            "model_path belongs to reward.reward_model.enable=True, which needs it; got",
        ),
        ({"reward_model": {"model_path": "folder"}}, "got enable=False and model_path=folder"),
        ({"timeout_seconds": 0}, "greater than 0"),
        ({"reward_model": {"n_gpus_per_node": 2}}, r"must be 0 or 1, got 2: .*transformers one"),
        (
            {
                "reward_model": {
                    "n_gpus_per_node": 1,
                    "rollout": {"name": "vllm", "tensor_model_parallel_size": 2},
                }
            },
            r"must be 0 or 2, got 1: vLLM takes rollout.tensor_model_parallel_size GPUs",
        ),
    ],
)
def test_pairs_belong_together(given, message) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(given)


def test_failures_stop_a_run_unless_a_score_is_given() -> None:
    assert RewardConfig().failure_score is None
    assert RewardConfig.model_validate({"failure_score": -1}).failure_score == -1.0
