"""Commands that leave processes behind, in real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from verl_rc.runtime.distributed.supervisor import supervised

DAEMONS = (
    "setsid --fork sh -c 'echo $$ >> pids; sleep 3600 & echo $! >> pids; wait' >/dev/null 2>&1; "
    "(sleep 3600 & echo $! >> pids); while [ $(wc -l < pids) -lt 3 ]; do sleep .01; done; exit 4"
)
"""Leaves three processes, two of them in a session of their own."""


def ended(command: Sequence[str], seconds: float = 0.0, **options: object) -> tuple[int, str, str]:
    """Its exit code, its output, and what the supervisor reports."""
    report, theirs = os.pipe()
    process = subprocess.run(
        supervised(command, seconds, theirs), pass_fds=[theirs], text=True, stdout=subprocess.PIPE, **options
    )
    os.close(theirs)
    with os.fdopen(report) as reported:
        return process.returncode, process.stdout, reported.read()


def are_running(folder: Path) -> list[int]:
    running = []
    for pid in map(int, (folder / "pids").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, perhaps just now
            if ") Z" not in Path(f"/proc/{pid}/stat").read_text():
                running.append(pid)
    return running


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", -11), ("kill -KILL $$", -9), ("kill -TERM 0", -15)],
)
def test_it_ends_like_its_command(script: str, code: int) -> None:
    assert ended(["sh", "-c", script]) == (code, "", "0")


def test_a_command_that_is_not_there_ends_with_127() -> None:
    assert ended(["no-such-command"], stderr=subprocess.DEVNULL) == (127, "", "0")


def test_what_a_command_leaves_behind_is_killed_and_counted(tmp_path: Path) -> None:
    assert ended(["sh", "-c", DAEMONS], cwd=tmp_path) == (4, "", "3")
    assert are_running(tmp_path) == []


def test_what_ends_by_itself_in_time_may_write_its_end() -> None:
    assert ended(["sh", "-c", "(sleep .3; echo late) & exit 0"], seconds=120) == (0, "late\n", "0")


def test_who_flees_by_ever_new_processes_is_caught() -> None:
    program = "import os\nwhile True:\n if os.fork(): os._exit(0)"
    assert ended([sys.executable, "-S", "-c", program])[0] == 0  # else it would hold the output for ever


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGKILL])
def test_all_end_by_order_and_with_the_process_that_started_it(tmp_path: Path, order: signal.Signals) -> None:
    """SIGTERM goes to the supervisor, SIGKILL to the one that has started it."""
    script = DAEMONS.replace("exit 4", "sleep 3600")
    program = (
        "import subprocess, time; from verl_rc.runtime.distributed.supervisor import supervised; "
        f"process = subprocess.Popen(supervised(['sh', '-c', {script!r}])); print(process.pid, flush=True); "
        "process.wait()"
    )
    root = str(Path(__file__).parents[4])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as starter:
        assert starter.stdout is not None
        supervisor = int(starter.stdout.readline())
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 3:
            time.sleep(0.01)
        os.kill(supervisor if order == signal.SIGTERM else starter.pid, order)
    deadline = time.monotonic() + 120
    while are_running(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
