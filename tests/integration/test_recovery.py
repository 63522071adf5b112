"""Engines that die or hang are replaced in the real loop, and nothing that is sampled changes."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from made_samples import of_parts
from real_steps import RealRun

from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.trainer.cluster.remote import Pending, RemoteProcess
from verl_rc.trainer.cluster.watchdog import identity_of
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.weights import Publisher


def engine_pid(run: RealRun) -> int:
    return identity_of(run.services.engines._engines[0]).pid


def sample(run: RealRun, record: StepRecord | None = None) -> list[list[tuple[int, float, int]]]:
    """Of each response the tokens, log-probs and versions."""
    requests = [
        GenerationRequest(run.services.validation_rows[row % 8].prompt_token_ids, seed=row)
        for row in range(24)
    ]
    options = SamplingOptions.for_training(
        run.services.config.actor_rollout_ref.rollout,
        run.services.config.data.max_response_length,
        run.services.stop_token_ids,
    )
    replace_lost = run.publisher.engine_replacer(0, record or StepRecord())
    samples = run.services.engines.generate(requests, options, replace_lost)
    return [of_parts(one.parts) for one in samples]


@pytest.fixture
def published_run(faulty_run: RealRun) -> RealRun:
    """The run with its weights published."""
    faulty_run.publisher.publish(0, StepRecord())
    return faulty_run


@pytest.mark.slow
def test_an_engine_hangs_while_it_samples_and_the_next_dies_while_it_starts(
    published_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old = sample(published_run), engine_pid(published_run)
    replace_engines = Publisher._replace_engines

    def replace_with_patience(*given: Any) -> None:
        monkeypatch.undo()  # the new engine may take its time
        replace_engines(*given)

    monkeypatch.setattr(Publisher, "_replace_engines", replace_with_patience)
    monkeypatch.setattr(published_run.services.engines, "_timeout_seconds", 1.0)
    build, killed = RemoteProcess.build, list[RemoteProcess]()

    def build_and_die_once(process: RemoteProcess, target: str, **arguments: Any) -> Pending:
        pending = build(process, target, **arguments)
        if not killed:
            killed.append(process)
            process.kill()
        return pending

    os.kill(old, signal.SIGSTOP)
    record = StepRecord()
    with patch.object(RemoteProcess, "build", build_and_die_once):
        assert sample(published_run, record) == before
    assert not Path(f"/proc/{old}").exists()
    assert (record.engines_replaced, record.requests_reissued) == (2, 24)


def test_an_engine_that_dies_in_an_update_ends_the_run_or_is_replaced(
    published_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, publisher = published_run.services, published_run.publisher
    before, old, send = sample(published_run), engine_pid(published_run), services.actor.send_weights

    def send_to_the_dead(whole: bool) -> list[object]:
        os.kill(old, signal.SIGKILL)
        monkeypatch.setattr(services.actor, "send_weights", send)
        return send(whole)

    monkeypatch.setattr(services.actor, "send_weights", send_to_the_dead)
    record = StepRecord()
    record.engines_replaced = 3
    with pytest.raises(
        RemoteError, match=r"at most 3 engines .* 4 were lost, the last: rollout engine 0 died"
    ):
        publisher.publish(0, record)
    publisher.publish(0, StepRecord())
    assert engine_pid(published_run) != old
    assert sample(published_run) == before
