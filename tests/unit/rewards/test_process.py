"""The inside of a reward process, in a thread of this one: what it answers to what."""

import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from verl_rc.config.task import RewardConfig
from verl_rc.rewards import RewardOutput, RewardSample
from verl_rc.rewards.process import Failed, LoadFailed, Ready, serve


@pytest.fixture(autouse=True)
def no_alarm(monkeypatch):
    """The alarm that ends an orphaned process must not end the tests; what it was set to is kept."""
    seconds = []
    monkeypatch.setattr(signal, "alarm", seconds.append)
    return seconds


def answers_to(*messages: object) -> list[object]:
    ours, theirs = Pipe()
    assert isinstance(theirs, Connection)
    for message in messages:
        ours.send(message)
    received = []
    with theirs:
        serve_until_told_all(ours, theirs, received, len(messages))
    return received


def serve_until_told_all(ours, theirs, received, count):
    import threading

    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    for _ in range(count):
        received.append(ours.recv())
        if isinstance(received[-1], LoadFailed):
            break
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def config(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, **_):\n    return {'score': 1 / float(solution_str), 'text': "
        "solution_str}\n"
    )
    section = {"custom_reward_function": {"path": str(tmp_path / "mine.py")}, "timeout_seconds": 2.5}
    return RewardConfig.model_validate(section)


def test_samples_are_answered_in_order_until_the_driver_hangs_up(config, no_alarm):
    samples = [RewardSample(index, "mine", None, {}, text) for index, text in enumerate(["4", "0", "2"])]
    ready, first, failed, third = answers_to(config, *samples)
    assert ready == Ready()
    assert first == RewardOutput(0.25, {"text": "4"})
    assert third == RewardOutput(0.5, {"text": "2"})
    assert isinstance(failed, Failed)
    assert "raised ZeroDivisionError: " in failed.reason
    assert "for row 1 (data_source 'mine', response '0')" in failed.reason
    assert no_alarm == [8, 0, 8, 0, 8, 0]


def test_a_function_that_cannot_be_loaded_is_refused(config):
    missing = config.custom_reward_function.model_copy(update={"name": "judge"})
    [answer] = answers_to(config.model_copy(update={"custom_reward_function": missing}))
    assert isinstance(answer, LoadFailed)
    assert "must name a function of" in answer.reason


def test_it_starts_without_torch():
    program = "import sys, verl_rc.rewards.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
