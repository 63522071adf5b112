"""How many engines may be replaced, what is counted, and that a loss during recovery is recovered from too."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_rc.cluster.engine_group import EnginesLostError
from verl_rc.cluster.remote import ProcessLostError, RemoteError
from verl_rc.driver import recovery, weights
from verl_rc.driver.recovery import Recovery
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord


def loss(*engines: int) -> EnginesLostError:
    return EnginesLostError({engine: ProcessLostError(f"rollout engine {engine} died") for engine in engines}, {})


class Machine:
    """Engines and the way of weights as one list of what was done; ``deliver`` fails as often as there are losses."""

    num_engines = 2

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.requests_reissued = 0
        self.losses: list[EnginesLostError] = []

    def replace(self, engines: list[int]) -> list[Any]:
        self.done.append(("replace", engines))
        return []

    def open(self) -> None:
        self.done.append("open")

    def sleep(self) -> None:
        self.done.append("sleep")

    def wake_up(self, tag: str) -> None:
        self.done.append(tag)

    def deliver(self, version: int) -> tuple[None, None]:
        self.done.append(("deliver", version))
        if self.losses:
            raise self.losses.pop(0)
        return None, None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(recovery, "wait_for_all", lambda pending, timeout: [])
    monkeypatch.setattr(weights, "check_receipts", lambda *_: None)
    monkeypatch.setattr(weights, "check_canary", lambda run, version, record: run.engines.done.append(("canary", version)))
    return Machine()


def run_on(machine: Machine, limit: int) -> Run:
    rollout = SimpleNamespace(max_engine_replacements=limit, sync_proof=SimpleNamespace(canary_freq=0))
    run = SimpleNamespace(
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=rollout), trainer=SimpleNamespace(ready_timeout_seconds=1.0)
        ),
        engines=machine,
        transport=machine,
        recovery=Recovery(),
        manifest=SimpleNamespace(num_bytes=1, tensors=()),
        progress=SimpleNamespace(published=4),
    )
    return cast(Run, run)


def test_new_engines_get_the_weights_the_others_have_with_proof(machine: Machine) -> None:
    run = run_on(machine, limit=3)
    weights.restore(run, loss(1))
    assert machine.done == [
        ("replace", [1]), "open", "sleep", "weights", ("deliver", 4), "kv_cache", ("canary", 4)
    ]  # fmt: skip
    machine.requests_reissued = 8
    expected = {"recovery/engines_replaced": 1.0, "recovery/requests_reissued": 8.0}
    assert run.recovery.take_counts(machine) == expected
    assert run.recovery.take_counts(machine) == dict.fromkeys(expected, 0.0)


def test_a_loss_in_an_update_and_another_while_that_is_mended(machine: Machine) -> None:
    machine.losses = [loss(0), loss(0, 1)]
    run = run_on(machine, limit=3)
    weights.publish(run, 5, StepRecord())
    assert [step for step in machine.done if step[0] in ("replace", "deliver", "canary")] == [
        ("deliver", 5), ("replace", [0]), ("deliver", 5), ("replace", [0, 1]), ("deliver", 5), ("canary", 5)
    ]  # fmt: skip
    assert run.progress.published == 5


@pytest.mark.parametrize("limit", [0, 2])
def test_more_losses_than_allowed_end_the_run_with_the_last(machine: Machine, limit: int) -> None:
    machine.losses = [loss(0)] * 4
    expected = rf"max_engine_replacements={limit} .*but {limit + 1} were lost, the last: rollout engine 0 died"
    with pytest.raises(RemoteError, match=expected):
        weights.publish(run_on(machine, limit), 5, StepRecord())
    assert [step for step in machine.done if step[0] == "replace"] == [("replace", [0])] * limit
