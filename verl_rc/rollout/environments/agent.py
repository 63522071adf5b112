"""An agent from outside: a program with a loop of its own that talks to OpenAI's chat endpoint."""

import asyncio
import inspect
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from verl_rc.config.user_code import import_attribute
from verl_rc.data.episode import Opening, Reply, Turn
from verl_rc.rollout.environment import Environment, EpisodeFailedError
from verl_rc.rollout.environments.agent_task import AgentTask
from verl_rc.rollout.environments.chat import (
    ChatCall,
    RefusedCallError,
    assistant_message,
    completion,
    parse_call,
    plain_message,
)
from verl_rc.rollout.environments.chat_endpoint import ChatEndpoint, EndpointLimits

_LOOK_SECONDS = 0.05
"""How often it is seen whether a process has ended."""
_OUTPUT_KEPT = 65_536
"""Bytes at the end of what a process writes."""
_WORDS_SHOWN = 2_000
_ROW_BYTES = 100_000
"""Linux takes 128 KiB in one variable of a process."""
_START = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the command in a process that the kernel kills when its host dies."""


_BRANCHES = "branches"
_CUT = "the run's limit of tokens or turns has cut the last turn off, so no turn follows; end with a score."


@dataclass
class _Pending:
    """A call that waits for the policy's turn."""

    call: ChatCall
    answer: "asyncio.Future[dict[str, Any]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_lost: bool = False
    """Its connection was lost: the client may call again."""


class Agent(Environment):
    """A program that calls a chat endpoint, seen as an environment.

    Its first call is the prompt, what it adds in a further one is the reply to the policy's turn, and the
    score with which it ends is the reward of the last turn. A call that does not continue the one before (a
    *branch*) begins another conversation in the same episode. Calls that are made at the same time are
    answered one after the other. An agent that fails after a turn that a limit cut off ends its episode as
    truncated, without a reward.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        function: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        address: str = "127.0.0.1",
        limits: Mapping[str, float] | None = None,
    ) -> None:
        """Name a ``command`` or a ``function``.

        Args:
            command: Of a process, which gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``VERL_RC_ROW`` (JSON)
                and ``VERL_RC_SEED``. Its last line of output is its score: ``{"reward": 1.0}``, where
                ``metrics`` may stand beside.
            function: ``module:function``, which is called with an ``AgentTask``, runs in this event loop
                (``async def``) and returns its score: a number, or a mapping like that line.
            arguments: Further keyword arguments of the function.
            address: Which the endpoint listens at; ``node``: that of this node in its network.
            limits: See ``EndpointLimits``.
        """
        if (command is None) == (function is None):
            raise ValueError(
                "an agent needs environment.arguments.command or .function (module:function), and one of "
                f"them, got command={command!r} and function={function!r}."
            )
        self._run_agent: Callable[[AgentTask], Awaitable[Any]]
        if function is not None:
            self._name, self._run_agent = function, _function(function, arguments or {})
        else:
            words = shlex.split(command) if isinstance(command, str) else list(command or ())
            self._name, self._run_agent = shlex.join(words), _process(words, arguments or {})
        self._address = address
        self._limits = EndpointLimits(**(limits or {}))  # type: ignore[arg-type]
        self._arrivals: asyncio.Queue[_Pending] = asyncio.Queue()
        self._endpoint: ChatEndpoint | None = None
        self._calls: list[_Pending] = []
        """All of them, in the order of their arrival."""
        self._last: _Pending | None = None
        """The one that the next turn answers, or the last turn has answered."""
        self._why_refused = ""
        self._is_cut = False
        """A limit has cut the last turn off."""

    def __repr__(self) -> str:
        """How messages call it."""
        return f"Agent({self._name}, {len(self._calls)} calls)"

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """See ``Environment``. Raises ``RuntimeError`` when the agent ends without a call."""
        endpoint = await ChatEndpoint.here(self._address, self._limits)
        self._endpoint, self._key = endpoint, endpoint.open(self._answer)
        task = AgentTask(row, seed, endpoint.url, self._key)
        self._running = asyncio.ensure_future(self._run_agent(task))
        call = await self._next_call()
        if call is None:
            self._require_no_failure()
            raise RuntimeError(f"{self!r} must call its endpoint ({task.base_url}), but has ended without.")
        return Opening(call.messages, call.tools)

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``. Raises ``RuntimeError`` when the agent fails."""
        assert self._last is not None
        last, message = self._last, assistant_message(turn, self._last.call.tools)
        call = None
        if not self._running.done():  # else it has ended without waiting for this turn
            last.answer.set_result(completion(turn, message))
            self._is_cut = not turn.stopped
            if self._is_cut:
                self._refuse_waiting(400, _CUT)
            call = await self._next_call()
        if call is not None:
            known = [*last.call.messages, plain_message(message)]
            new = call.messages[len(known) :]
            own_words = any(one["role"] == "assistant" for one in new)
            if new and not own_words and call == ChatCall([*known, *new], last.call.tools):
                return Reply(new)
            return Reply(opening=Opening(call.messages, call.tools), metrics={_BRANCHES: 1.0})
        if self._is_cut and self._running.exception() is not None:
            return Reply(truncated=True, metrics={_BRANCHES: 0.0})
        self._require_no_failure()
        score = _score(self._running.result(), self._name)
        return Reply(reward=score["reward"], done=True, metrics={**score.get("metrics", {}), _BRANCHES: 0.0})

    async def close(self) -> None:
        """End the agent."""
        if self._endpoint is None:
            return
        self._endpoint.close(self._key)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._refuse_waiting(410, "the episode has ended.")

    async def _next_call(self) -> ChatCall | None:
        """The agent's next call; None: it has ended."""
        arrival = asyncio.ensure_future(self._arrivals.get())
        try:
            await asyncio.wait({arrival, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if self._running.done():
                return None
            self._last = arrival.result()
            return self._last.call
        finally:
            arrival.cancel()

    def _refuse_waiting(self, status: int, why: str) -> None:
        """Refuse the calls that wait for a turn."""
        self._arrivals = asyncio.Queue()
        for one in self._calls:
            if not one.answer.done():
                one.answer.set_exception(RefusedCallError(status, why))
                one.answer.exception()  # somebody has seen it

    def _require_no_failure(self) -> None:
        error = self._running.exception()
        if error is not None:
            refused = f" after a call that was refused ({self._why_refused})" if self._why_refused else ""
            raise RuntimeError(f"{self!r} has failed{refused}: {error!r}") from error

    # for the endpoint

    async def _answer(self, body: Any) -> Mapping[str, Any]:
        """The response to a call. Raises ``RefusedCallError``."""
        try:
            pending = self._pending(parse_call(body))
        except RefusedCallError as refusal:
            self._why_refused = str(refusal)
            raise
        pending.is_lost = False
        try:
            # A client that goes away cancels this call, not the answer: it may call again.
            return await asyncio.shield(pending.answer)
        except asyncio.CancelledError:
            pending.is_lost = True
            raise

    def _pending(self, call: ChatCall) -> _Pending:
        lost = next((one for one in self._calls if one.is_lost and one.call == call), None)
        if lost is not None:
            return lost
        if self._is_cut:
            raise RefusedCallError(400, _CUT)
        self._calls.append(_Pending(call))
        self._arrivals.put_nowait(self._calls[-1])
        return self._calls[-1]


def _function(name: str, arguments: Mapping[str, Any]) -> Callable[[AgentTask], Awaitable[Any]]:
    """What runs an agent that is a function. Raises ``ValueError`` when there is none."""
    key = f"actor_rollout_ref.rollout.environment.arguments.function={name}"
    function = import_attribute(name, key, "function")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{key} must be an async function, got {function!r}; start others by a command.")
    return lambda task: function(task, **arguments)


def _process(words: Sequence[str], arguments: Mapping[str, Any]) -> Callable[[AgentTask], Awaitable[Any]]:
    """What runs an agent that is a process. Raises ``ValueError`` when there is no such command."""
    key = "actor_rollout_ref.rollout.environment.arguments"
    if arguments:
        raise ValueError(f"{key}.arguments are those of a function; write them into {key}.command.")
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"{key}.command must begin with a program that can be run, got {list(words)}.")

    async def run(task: AgentTask) -> Any:
        variables = task.variables()
        if len(variables["VERL_RC_ROW"]) > _ROW_BYTES:
            raise EpisodeFailedError(
                f"a row must have at most {_ROW_BYTES} characters of JSON to be a variable of a process, got "
                f"{len(variables['VERL_RC_ROW'])}; put a name into it, by which the agent finds the rest."
            )
        return await _run_process(words, variables)

    return run


async def _run_process(words: Sequence[str], variables: Mapping[str, str]) -> Any:
    """The JSON in the last line of output. Raises ``RuntimeError`` when the process fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
        start_new_session=True,  # a group of processes that can be killed as one
    )
    assert process.stdout is not None
    assert process.stderr is not None
    tails = asyncio.gather(_tail(process.stdout), _tail(process.stderr))
    try:
        # Before Python 3.13 wait() waits for the end of its outputs, too.
        while process.returncode is None:
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        # Also what it leaves behind, which would keep its outputs open.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
    output, errors = await tails
    if code:
        written = (errors or output).decode(errors="replace")[-_WORDS_SHOWN:]
        raise RuntimeError(f"its process ended with exit code {code} and wrote: {written}")
    lines = output.decode(errors="replace").splitlines()
    try:
        return json.loads(lines[-1] if lines else "")
    except (ValueError, RecursionError):
        return lines[-1:]


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The end of what is written to a stream."""
    tail = b""
    while chunk := await stream.read(_OUTPUT_KEPT):
        tail = (tail + chunk)[-_OUTPUT_KEPT:]
    return tail


def _score(value: Any, name: str) -> Mapping[str, Any]:
    """An agent's score as a mapping. Raises ``EpisodeFailedError`` when it is none."""
    score = {"reward": value} if isinstance(value, int | float) else value
    if (
        not isinstance(score, Mapping)
        or "reward" not in score
        or set(score) - {"reward", "metrics"}
        or not isinstance(score.get("metrics", {}), Mapping)
    ):
        raise EpisodeFailedError(
            f"the agent {name} must end with a number, or with {{reward, metrics}} (a process: as JSON in "
            f"its last line of output), got {value!r:.200}."
        )
    return score
