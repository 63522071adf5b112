"""The object of a reward process, in this one: what it answers to what."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_rc.algorithm.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.config.task import RewardConfig
from verl_rc.runtime.workers.reward_process import LoadedReward


@pytest.fixture
def config(tmp_path: Path) -> RewardConfig:
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, **_):\n    return {'score': 1 / float(solution_str), 'text': "
        "solution_str}\n"
    )
    section = {"custom_reward_function": {"path": str(tmp_path / "mine.py")}}
    return RewardConfig.model_validate(section)


def test_a_sample_that_fails_is_answered_with_the_reason(config: RewardConfig) -> None:
    reward = LoadedReward(config)
    assert reward.problem() is None
    samples = [RewardSample(index, "mine", None, {}, text) for index, text in enumerate(["4", "0", "2"])]
    [(_, first), (_, failed), (_, third)] = reward.score(list(enumerate(samples)))
    assert first == RewardOutput(0.25, {"text": "4"})
    assert third == RewardOutput(0.5, {"text": "2"})
    assert isinstance(failed, RewardError)
    assert "raised ZeroDivisionError: " in str(failed)
    assert "for row 1 (data_source 'mine', response '0')" in str(failed)


def test_a_function_that_cannot_be_loaded_is_refused(config: RewardConfig) -> None:
    missing = config.custom_reward_function.model_copy(update={"name": "judge"})
    problem = LoadedReward(config.model_copy(update={"custom_reward_function": missing})).problem()
    assert problem is not None
    assert "must name a function of" in problem


def test_it_starts_without_torch() -> None:
    modules = "verl_rc.runtime.distributed.child_process, verl_rc.runtime.workers.reward_process"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
