"""An environment for tests: guess a secret digit in three turns; its hints are noisy, so its random state
matters."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_rc.runtime.rollout.environment import Environment, Opening, PolicyError, Reply, Turn

KILL = "GUESSING_KILL"
"""Environment variable of ``Deadly``: victim (driver, itself), number of the call, before or after, and a
file that says it was done."""


class Guess(Environment):
    """A turn's reward is 1 for the secret, else -0.1; ``h`` or ``l`` says where it lies, ``?`` nothing."""

    def __init__(
        self, latency: float = 0.0, snapshot: bool = True, max_turns: int = 3, faults: Mapping[str, int] = {}
    ) -> None:
        """``snapshot``: its state can be written down. ``faults``: the turn at which each happens."""
        self.latency, self.snapshot, self.max_turns, self.faults = latency, snapshot, max_turns, faults
        self.closed = 0
        self.turns: list[Turn] = []

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        self.random = random.Random(time.time_ns() if "random" in self.faults else seed)
        self.secret, self.guesses = self.random.randrange(10), 0
        index = row.get("extra_info", {}).get("index", row.get("ground_truth", ""))
        return Opening([{"role": "user", "content": f"guess {index}"}])  # rows differ by their prompts

    async def step(self, turn: Turn) -> Reply:
        self.turns.append(turn)
        await asyncio.sleep(self.latency)
        if self.faults.get("hang") == turn.number:
            await asyncio.sleep(3600)
        if self.faults.get("block") == turn.number:
            time.sleep(3)
        if self.faults.get("raise") == turn.number:
            raise RuntimeError("the sandbox was lost")
        if self.faults.get("timeout") == turn.number:
            raise TimeoutError("no answer of the database")
        if self.faults.get("policy") == turn.number:
            raise PolicyError("it calls what it must not", reward=-5.0)
        self.guesses += 1
        right = turn.text[:1] == str(self.secret)
        done = right or self.guesses == self.max_turns
        hint = "?" if self.random.random() < 0.5 else "h" if turn.text[:1] > str(self.secret) else "l"
        role = "assistant" if self.faults.get("role") == turn.number else "user"
        return Reply(
            [] if done else [{"role": role, "content": hint}],
            reward=float("nan") if self.faults.get("nan") == turn.number else 1.0 if right else -0.1,
            done=done,
            metrics={"right": float(right)},
        )

    async def state(self) -> bytes | None:
        if not self.snapshot:
            return None
        return json.dumps([self.secret, self.guesses, self.random.getstate()]).encode()

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        self.secret, self.guesses, (version, numbers, following) = json.loads(state)
        self.random = random.Random()
        self.random.setstate((version, tuple(numbers), following))

    async def close(self) -> None:
        self.closed += 1
        if "close" in self.faults:
            raise RuntimeError("the door is stuck")


class WithoutStep(Environment):
    """No environment: ``step`` is missing."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        pass


class Unlucky(Guess):
    """It cannot be opened."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        raise RuntimeError("no sandbox is left")


class Deadly(Guess):
    """It kills the driver, or its own process, once: before or after its reply to a turn."""

    calls = 0
    """Turns that this process was asked."""

    async def step(self, turn: Turn) -> Reply:
        Deadly.calls += 1
        victim, call, moment, done = os.environ.get(KILL, "nobody 0 before -").split(maxsplit=3)
        is_due = Deadly.calls == int(call) and not Path(done).exists()
        if is_due and moment == "before":
            kill(victim, Path(done))
        reply = await super().step(turn)
        if is_due and moment == "after":
            asyncio.get_running_loop().call_later(0.01, kill, victim, Path(done))
        return reply


def kill(victim: str, done: Path) -> None:
    """kill -9, and a file that says so."""
    done.touch()
    pid = os.getpid() if victim == "itself" else driver()
    os.kill(pid, signal.SIGKILL)


def driver() -> int:
    """The process that started this one's run (see real_runs.py)."""
    marker = f"VERL_RC_TEST_CHILD={os.environ['VERL_RC_TEST_CHILD']}".encode()
    (found,) = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if b"disturbed_run.py" in (folder / "cmdline").read_bytes()
        and marker in (folder / "environ").read_bytes().split(b"\0")
    ]
    return found
