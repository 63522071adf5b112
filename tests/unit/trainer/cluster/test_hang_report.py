"""Who waits for whom, from dumps as faulthandler writes them, and processes of all kinds of silence, looked
into from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from verl_rc.trainer.cluster import watchdog
from verl_rc.trainer.cluster.watchdog import (
    AwaitedProcess,
    ProcessIdentity,
    ProcessState,
    full_report,
    inspect_process,
    kill,
    summary,
)

HELPER = 'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 5 in wait\n\n'
MAIN = (
    "Current thread 0x02 (most recent call first):\n{}"
    '  File "/x/verl_rc/trainer/cluster/remote.py", line 9 in call\n'
)
REDUCE = MAIN.format(
    '  File "/lib/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n  File "/x/rows.py", line 3 in step\n'  # noqa: E501
)
COMPUTE = MAIN.format('  File "/x/forward.py", line 11 in attend\n')


COLLECT = MAIN.format(
    '  File "/lib/threading.py", line 5 in wait\n'
    '  File "/x/verl_rc/runtime/rollout/step_loop.py", line 8 in take\n'
)
SAMPLE = (
    'Thread 0x03 (most recent call first):\n  File "/lib/vllm/model.py", line 4 in forward\n'
    '  File "/x/verl_rc/runtime/rollout/step_loop.py", line 6 in _run\n\n'
)


def ranks(*states: ProcessState | None) -> list[AwaitedProcess]:
    return [
        AwaitedProcess(f"rank {i}", "update", "answered score 7 s ago", state)
        for i, state in enumerate(states)
    ]


def short(*states: ProcessState | None) -> str:
    return summary(ranks(*states), 30.0, "trainer.hang_timeout_seconds", {})


def test_everyone_is_where_it_stands() -> None:
    reduces, computes = ProcessState("runs", HELPER + REDUCE), ProcessState("runs", HELPER + COMPUTE)
    text = short(reduces, computes, None, ProcessState("is stopped"))
    assert "did not answer within 30 s: rank 0 (update), rank 1 (update), rank 3 (update)." in text
    assert (
        "  rank 0: waits in a collective for its peers, at all_reduce "
        "(/lib/torch/distributed/distributed_c10d.py:7);" in text
    )
    assert "  rank 1: at attend (/x/forward.py:11); last sign of life: answered score 7 s ago." in text
    assert "  rank 3: is stopped; " in text
    assert "These answered: rank 2." in text
    assert "Raise trainer.hang_timeout_seconds" in text


def test_the_report_holds_every_stack() -> None:
    states = ProcessState("runs", HELPER + REDUCE), None, ProcessState("has ended")
    text = full_report(short(*states), ranks(*states), '  File "train.py", line 1, in train\n')
    assert HELPER + REDUCE.rstrip() in text
    assert 'File "train.py"' in text
    assert "rank 2, asked to update (newest frame first):\nno stacks: it has ended" in text
    assert "rank 1, asked" not in text


def test_a_dump_without_the_drivers_call_still_tells_something() -> None:
    assert "rank 0: at wait (/lib/threading.py:5);" in short(ProcessState("runs", HELPER))


PROGRAM = """
import dataclasses, json, time
from verl_rc.trainer.cluster.watchdog import register_stack_dump

def rest():
    print(json.dumps(dataclasses.asdict(register_stack_dump("here"))), flush=True)
    time.sleep(3600)

rest()
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_DUMP_SECONDS", 120.0)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    import json

    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, ProcessIdentity(**json.loads(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_that_sleeps_shows_where_and_goes_on(
    child: tuple[subprocess.Popen[str], ProcessIdentity],
) -> None:
    process, identity = child
    for _ in range(2):
        state = inspect_process(identity)
        assert state.condition == "runs"
        assert state.stacks.count("in rest") == 1  # the dump before is not shown again
    assert process.poll() is None


def test_one_that_is_stopped_is_named_and_can_be_ended(
    child: tuple[subprocess.Popen[str], ProcessIdentity],
) -> None:
    process, identity = child
    os.kill(identity.pid, signal.SIGSTOP)
    while b"State:\tT" not in open(f"/proc/{identity.pid}/status", "rb").read():  # noqa: SIM115
        time.sleep(0.01)
    assert inspect_process(identity).condition.startswith("is stopped by a signal (SIGSTOP)")
    kill(identity)
    assert process.wait(120) == -signal.SIGKILL
    assert inspect_process(identity).condition == "has ended"
    kill(identity)


def test_another_process_with_the_same_pid_is_left_alone(
    child: tuple[subprocess.Popen[str], ProcessIdentity],
) -> None:
    process, identity = child
    other = replace(identity, started=identity.started - 1)
    kill(other)
    assert inspect_process(other).condition == "has ended"
    assert process.poll() is None


def test_an_engine_stands_where_the_thread_that_samples_does() -> None:
    assert "rank 0: at forward (/lib/vllm/model.py:4);" in short(
        ProcessState("runs", COLLECT + "\n" + SAMPLE)
    )


def test_a_process_that_ends_before_the_signal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide why all processes are to end."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(watchdog, "process_status", lambda _: ("R", 7))  # what was seen a moment ago
    kill(watchdog.ProcessIdentity("node", ended.pid, 7, ""))
