"""Engines that die or hang are replaced in the real loop, and nothing that is sampled changes; SIGTERM ends a run saved."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from real_runs import train
from real_steps import RealRun
from small_runs import SHARE_OF_DIGITS, run_overrides

from verl_rc.cluster.remote import RemoteError
from verl_rc.cluster.watchdog import identity_of
from verl_rc.driver import weights
from verl_rc.driver.step_record import StepRecord
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions


def engine_pid(run: RealRun) -> int:
    return identity_of(run.services.engines._engines[0]).pid


def sample(run: RealRun, record: StepRecord | None = None) -> tuple[torch.Tensor, ...]:
    requests = [GenerationRequest(run.services.validation_rows[row % 8].prompt_token_ids, seed=row) for row in range(24)]
    options = SamplingOptions.for_training(run.services.config.actor_rollout_ref.rollout, run.services.stop_token_ids)
    answer = weights.generate(run.services, run.state, requests, options, 0, record or StepRecord()).result
    return answer.responses, answer.response_lengths, answer.rollout_log_probs, answer.policy_versions


def assert_equal(one: tuple[torch.Tensor, ...], two: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def published_run(faulty_run: RealRun, monkeypatch: pytest.MonkeyPatch) -> RealRun:
    """The run with its weights published."""
    weights.publish(faulty_run.services, faulty_run.state, 0, StepRecord())
    monkeypatch.setattr(faulty_run.services.engines, "_timeout_seconds", 20.0)
    return faulty_run


def test_an_engine_that_dies_while_it_samples(published_run: RealRun) -> None:
    before, old = sample(published_run), engine_pid(published_run)
    os.kill(old, signal.SIGSTOP)  # so that it is still at it
    threading.Timer(1.0, os.kill, (old, signal.SIGKILL)).start()
    record = StepRecord()
    assert_equal(sample(published_run, record), before)
    assert engine_pid(published_run) != old
    assert (record.engines_replaced, record.requests_reissued) == (1, 24)


def test_an_engine_that_hangs_when_weights_come(published_run: RealRun) -> None:
    before, old = sample(published_run), engine_pid(published_run)
    os.kill(old, signal.SIGSTOP)
    record = StepRecord()
    weights.publish(published_run.services, published_run.state, 0, record)
    assert_equal(sample(published_run), before)
    assert not Path(f"/proc/{old}").exists()
    assert (record.engines_replaced, record.requests_reissued) == (1, 0)


def test_an_engine_that_dies_in_the_middle_of_an_update(published_run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before, old = sample(published_run), engine_pid(published_run)
    send = published_run.services.actor.send_weights

    def send_to_the_dead() -> list[object]:
        if engine_pid(published_run) == old:
            os.kill(old, signal.SIGKILL)
        return send()

    monkeypatch.setattr(published_run.services.actor, "send_weights", send_to_the_dead)
    weights.publish(published_run.services, published_run.state, 0, StepRecord())
    assert_equal(sample(published_run), before)


def test_the_budget_ends_the_run_with_the_last_cause(published_run: RealRun) -> None:
    record = StepRecord()
    record.engines_replaced = 3
    os.kill(engine_pid(published_run), signal.SIGKILL)
    with pytest.raises(RemoteError, match=r"max_engine_replacements=3 .* 4 were lost, the last: rollout engine 0 died"):
        weights.publish(published_run.services, published_run.state, 0, record)
    weights.publish(published_run.services, published_run.state, 0, StepRecord())  # whole again for the tests that follow


@pytest.fixture(scope="module")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("terminated")
    (folder / "reward.py").write_text(SHARE_OF_DIGITS)
    return [
        *run_overrides(task, folder / "run"),
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=100",
        "trainer.total_training_steps=3",
    ]


def test_sigterm_saves_the_step_and_exits_with_143(overrides: list[str], tmp_path: Path) -> None:
    update = ["driver", "SIGTERM", "verl_rc.driver.stages:update_actor", "2", "before"]
    terminated = train(overrides, *update)
    assert terminated.returncode == 143, terminated.stderr[-3000:]
    assert "SIGTERM: finishing the step" in terminated.stdout
    assert "Traceback" not in terminated.stderr
    run = Path(next(item for item in overrides if item.startswith("trainer.default_local_dir")).partition("=")[2])
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_2"]
    resumed = train(overrides)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "2 steps are done" in resumed.stdout
    assert sorted(path.name for path in run.glob("global_step_*")) == ["global_step_2", "global_step_3"]
