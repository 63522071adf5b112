"""A reward model in a process of Ray, and a function of one's own in another: the driver scores responses
with both."""

import os
from pathlib import Path

import pytest
from small_reward_models import conversation, write_reward_model

from verl_rc.config.task import RewardConfig
from verl_rc.records.dataset import PromptRow
from verl_rc.runtime.workers.reward_model_worker import RewardModelWorker
from verl_rc.trainer.scoring import open_scorer

OWN = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_model_score):
    return {"score": reward_model_score + len(solution_str), "process": os.getpid()}
"""


@pytest.mark.usefixtures("ray_here")
def test_the_model_judges_and_the_function_decides(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    model = {"enable": True, "model_path": str(write_reward_model(tmp_path / "judge"))}
    sections = {
        "reward_model": model,
        "custom_reward_function": {"path": str(tmp_path / "mine.py")},
        "num_workers": 1,
    }
    config = RewardConfig.model_validate(sections)
    texts = ["1", "22", "333"]
    rows = [PromptRow(place, [1], conversation("21", "")[:1], "riddles", None, {}) for place in range(3)]
    with open_scorer(config, {"riddles": "row 0"}, 600.0) as scorer:
        outputs = scorer.score(rows, texts)
    judged = RewardModelWorker(config.reward_model).score([conversation("21", text) for text in texts])
    assert len(set(judged)) == 3
    assert [output.extras["reward_model_score"] for output in outputs] == pytest.approx(judged, abs=1e-5)
    assert [output.score - output.extras["reward_model_score"] for output in outputs] == pytest.approx(
        [1, 2, 3]
    )
    assert outputs[0].extras["process"] != os.getpid()
