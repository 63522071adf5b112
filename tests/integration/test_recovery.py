"""Engines that die or hang are replaced in the real loop, and nothing that is sampled changes."""

import os
import signal
from pathlib import Path

import pytest
import torch

from verl_rc.cluster.engine_group import EnginesLostError
from verl_rc.cluster.remote import RemoteError
from verl_rc.cluster.watchdog import identity_of
from verl_rc.driver import weights
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions


def engine_pid(run: Run) -> int:
    return identity_of(run.engines._engines[0]).pid


def sample(run: Run) -> tuple[torch.Tensor, ...]:
    requests = [GenerationRequest(run.validation_rows[row % 8].prompt_token_ids, seed=row) for row in range(24)]
    options = SamplingOptions.for_training(run.config.actor_rollout_ref.rollout, run.stop_token_ids)
    answer = run.engines.generate(requests, options)
    return answer.responses, answer.response_lengths, answer.rollout_log_probs, answer.policy_versions


def assert_equal(one: tuple[torch.Tensor, ...], two: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def published_run(faulty_run: Run) -> Run:
    """The run with its weights published; counters at zero."""
    weights.publish(faulty_run, 0, StepRecord())
    faulty_run.recovery.take_counts(faulty_run.engines)
    return faulty_run


def test_an_engine_that_hangs_while_it_samples(published_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before, old, engines = sample(published_run), engine_pid(published_run), published_run.engines
    restore = engines.on_loss

    def restore_with_patience(lost: EnginesLostError) -> None:
        monkeypatch.undo()  # the new engine may take its time
        restore(lost)

    monkeypatch.setattr(engines, "on_loss", restore_with_patience)
    monkeypatch.setattr(engines, "_timeout_seconds", 1.0)
    os.kill(old, signal.SIGSTOP)
    assert_equal(sample(published_run), before)
    assert not Path(f"/proc/{old}").exists()
    counts = published_run.recovery.take_counts(engines)
    assert counts == {"recovery/engines_replaced": 1, "recovery/requests_reissued": 24}


def test_an_engine_that_dies_in_an_update_ends_the_run_or_is_replaced(
    published_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old = sample(published_run), engine_pid(published_run)
    send = published_run.actor.send_weights

    def send_to_the_dead() -> list[object]:
        os.kill(old, signal.SIGKILL)
        monkeypatch.setattr(published_run.actor, "send_weights", send)
        return send()

    monkeypatch.setattr(published_run.actor, "send_weights", send_to_the_dead)
    monkeypatch.setattr(published_run.recovery, "engines_replaced", 3)
    with pytest.raises(RemoteError, match=r"max_engine_replacements=3 .* 4 were lost, the last: rollout engine 0 died"):
        weights.publish(published_run, 0, StepRecord())
    published_run.recovery.take_counts(published_run.engines)
    weights.publish(published_run, 0, StepRecord())
    assert engine_pid(published_run) != old
    assert_equal(sample(published_run), before)
