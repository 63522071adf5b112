"""Processes of all kinds of silence, looked into from outside; no Ray."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from verl_rc.cluster import hang_report
from verl_rc.cluster.hang_report import ProcessIdentity, end, examine

PROGRAM = """
import dataclasses, json, time
from verl_rc.cluster.hang_report import register_stack_dump

def rest():
    print(json.dumps(dataclasses.asdict(register_stack_dump("here"))), flush=True)
    time.sleep(3600)

rest()
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_report, "_DUMP_SECONDS", 120.0)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    import json

    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, ProcessIdentity(**json.loads(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_that_sleeps_shows_where_and_goes_on(child: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    process, identity = child
    for _ in range(2):
        finding = examine(identity)
        assert finding.condition == "runs"
        assert finding.stacks.count("in rest") == 1  # the dump before is not shown again
    assert process.poll() is None


def test_one_that_is_stopped_is_named_and_can_be_ended(child: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    process, identity = child
    os.kill(identity.pid, signal.SIGSTOP)
    while b"State:\tT" not in open(f"/proc/{identity.pid}/status", "rb").read():  # noqa: SIM115
        time.sleep(0.01)
    assert examine(identity).condition.startswith("is stopped by a signal (SIGSTOP)")
    end(identity)
    assert process.wait(120) == -signal.SIGKILL
    assert examine(identity).condition == "has ended"
    end(identity)


def test_another_process_with_the_same_pid_is_left_alone(child: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    process, identity = child
    other = replace(identity, started=identity.started - 1)
    end(other)
    assert examine(other).condition == "has ended"
    assert process.poll() is None
