"""Who waits for whom when an answer does not come, in words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl_rc.cluster.process_stacks import Finding

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_SERVING = (re.compile(r'verl_rc/rollout/step_loop\.py", line \d+ in _run\b'), re.compile("verl_rc/cluster/remote.py"))
"""How to know the thread that serves the driver's call: in an engine the call itself only waits for the one that samples."""
_COLLECTIVE = "torch/distributed/"


@dataclass(frozen=True)
class Silence:
    """One process of a wait."""

    who: str
    what: str
    """What it was asked to do."""
    last_answer: str
    """Its last sign of life."""
    finding: Finding | None
    """None: it has answered."""


@dataclass(frozen=True)
class Wait:
    """One wait of the driver that took too long."""

    seconds: float
    limit_key: str
    """The configuration key that sets the limit."""
    processes: Sequence[Silence]
    driver_stack: str
    free_resources: str


def summary(wait: Wait) -> str:
    """One line for each process that has not answered, and the advice that fits."""
    silent = [process for process in wait.processes if process.finding is not None]
    answered = [process.who for process in wait.processes if process.finding is None]
    names = ", ".join(f"{process.who} ({process.what})" for process in silent)
    lines = [f"these processes did not answer within {wait.seconds:.0f} s: {names}."]
    lines += [f"  {process.who}: {_condition(process)}; last sign of life: {process.last_answer}." for process in silent]
    if answered:
        lines.append(f"  These answered: {', '.join(answered)}.")
    lines.append(f"Free resources of the cluster: {wait.free_resources}. Raise {wait.limit_key} if they are only slow.")
    return "\n".join(lines)


def full_report(wait: Wait) -> str:
    """The summary, then the stack of the driver and those of every process that has not answered."""
    parts = [summary(wait), "The driver waits in (newest frame last):\n" + wait.driver_stack.rstrip()]
    for process in wait.processes:
        if process.finding is not None:
            stacks = process.finding.stacks or f"no stacks: it {process.finding.condition}"
            parts.append(f"{process.who}, asked to {process.what} (newest frame first):\n{stacks}")
    return "\n\n".join(parts) + "\n"


def _condition(process: Silence) -> str:
    assert process.finding is not None
    frame = _innermost_frame(process.finding.stacks)
    if frame is None:
        return process.finding.condition
    waits = "waits in a collective for its peers, " if _in_collective(process.finding.stacks) else ""
    return f"{waits}at {frame}"


def _innermost_frame(stacks: str) -> str | None:
    """Where the thread stands that serves the driver's call; any thread if none does."""
    frame = _FRAME.search(_serving_thread(stacks))
    return None if frame is None else f"{frame['function']} ({frame['file']}:{frame['line']})"


def _in_collective(stacks: str) -> bool:
    frames = _FRAME.findall(_serving_thread(stacks))
    return any(_COLLECTIVE in file for file, _, _ in frames[:4])


def _serving_thread(stacks: str) -> str:
    threads = re.split(r"\n\s*\n|\n(?=(?:Current t|T)hread 0x)", stacks)
    return next((thread for mark in _SERVING for thread in threads if mark.search(thread)), threads[0])
