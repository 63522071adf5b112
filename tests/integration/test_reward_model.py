"""A reward model in a process of Ray, and a function of one's own in another: the driver scores responses
with both. transformers and vLLM serve the model alike."""

import os
import random
from pathlib import Path

import pytest
from small_reward_models import conversation, write_reward_model

from verl_rc.config.task import RewardConfig, RewardModelConfig
from verl_rc.records.dataset import PromptRow
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.workers.environment import engine_environment
from verl_rc.runtime.workers.reward_model_worker import TransformersRewardModel
from verl_rc.trainer.scoring import open_scorer

OWN = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_model_score):
    return {"score": reward_model_score + len(solution_str), "process": os.getpid()}
"""


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("server", [None, "vllm"])
def test_the_model_judges_and_the_function_decides(tmp_path: Path, server: str | None) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    model = {
        "enable": True,
        "model_path": str(write_reward_model(tmp_path / "judge")),
        "rollout": {"name": server},
    }
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
    judged = TransformersRewardModel(config.reward_model).score([conversation("21", text) for text in texts])
    assert len(set(judged)) == 3
    assert [output.extras["reward_model_score"] for output in outputs] == pytest.approx(judged, abs=1e-5)
    assert [output.score - output.extras["reward_model_score"] for output in outputs] == pytest.approx(
        [1, 2, 3]
    )
    assert outputs[0].extras["process"] != os.getpid()


@pytest.mark.parametrize("kind", [{}, {"has_padding": False}, {"pads_with_eos": True}])
def test_vllm_and_transformers_give_the_same_scores(tmp_path: Path, kind: dict[str, bool]) -> None:
    """Raw ones, with a sum of rounding errors between them; and the same reasons where there are none."""
    folder = write_reward_model(tmp_path, **kind)
    config = RewardModelConfig.model_validate(
        {"enable": True, "model_path": str(folder), "max_length": 62, "rollout": {"name": "vllm"}}
    )
    digits = random.Random(0)
    texts = ["".join(digits.choices("0123456789", k=digits.randrange(24))) for _ in range(40)]
    conversations = [conversation(question, answer) for question in texts[:8] for answer in texts]
    conversations.append(conversation("1", 30 * "23"))
    expected = TransformersRewardModel(config).score(conversations)
    engine = ChildProcess(
        "verl_rc.runtime.rollout.vllm.reward_model:VllmRewardModel",
        engine_environment(num_threads=1, device="cpu", one_node=True),
        config=config,
    )
    try:
        scores = engine.call("score", conversations)
        assert engine.call("score", []) == []
    finally:
        engine.end()
    assert scores.pop() == expected.pop()
    assert scores == pytest.approx(expected, abs=2e-5)
    assert min(scores) < -1  # an activation would not give
    assert max(scores) > 1
