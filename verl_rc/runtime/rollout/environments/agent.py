"""An agent from outside: a program with a loop of its own that talks to OpenAI's chat endpoint."""

import asyncio
import inspect
import json
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from verl_rc.config.schema import secret_variables
from verl_rc.config.user_code import import_attribute
from verl_rc.records.episode import Opening, Reply, Turn
from verl_rc.runtime.distributed.supervisor import supervised
from verl_rc.runtime.rollout.environment import Environment, EpisodeFailedError
from verl_rc.runtime.rollout.environments.agent_task import AgentTask
from verl_rc.runtime.rollout.environments.chat import (
    ChatCall,
    RefusedCallError,
    assistant_message,
    completion,
    parse_call,
    plain_message,
)
from verl_rc.runtime.rollout.environments.chat_endpoint import ChatEndpoint, EndpointLimits

_POLL_SECONDS = 0.05
"""Time between two checks whether a process has ended."""
_TAIL_BYTES = 65_536
"""Bytes at the end of a process's output that are read."""
_MAX_SHOWN_CHARACTERS = 2_000
_MAX_ROW_CHARACTERS = 100_000
"""Linux limits one environment variable to 128 KiB."""
_TAIL_SECONDS = 1.0
"""Time that processes which an agent leaves behind have to write and end, and then the outputs to close."""
_KILL_SECONDS = 3.0
"""Time in which a supervisor kills an agent and all that it has started."""

_MAX_WAITING = 512
"""Number of calls of an episode without an answer. A client that disconnects leaves its call behind."""
_KEY = "actor_rollout_ref.rollout.environment.arguments"
_BRANCHES, _LEFT = "branches", "left_processes"
_LIMIT_REACHED = (
    "the run's limit of tokens or turns has cut the last turn off, so no turn follows; end with a score."
)


@dataclass(frozen=True)
class _Ended:
    """The end of an agent."""

    score: Any
    left_processes: int = 0
    """Number of processes that it left behind, and that were killed."""


_Start = Callable[[AgentTask], Awaitable[_Ended]]


@dataclass
class _PendingCall:
    """A call that waits for the policy's turn."""

    call: ChatCall
    answer: "asyncio.Future[dict[str, Any]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_disconnected: bool = False
    """The connection was lost: the client may repeat the call."""


class Agent(Environment):
    """An environment that runs a program and serves its calls to a chat endpoint.

    The messages of the first call are the prompt. The messages that a later call adds are the reply to the
    policy's turn, and the program's final score is the reward of the last turn. A call that does not continue
    the previous one (a *branch*) begins another conversation in the same episode. Concurrent calls are
    answered one after the other. If the agent fails after a limit has cut a turn off, the episode ends as
    truncated, without a reward.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        function: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        address: str = "127.0.0.1",
        limits: Mapping[str, float] | None = None,
        pass_env: Sequence[str] = (),
    ) -> None:
        """Name a ``command`` or a ``function``.

        Args:
            command: Starts a process with the variables ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``,
                ``VERL_RC_ROW`` (JSON) and ``VERL_RC_SEED``. Its last line of output is its score:
                ``{"reward": 1.0}``, with ``metrics`` if there are any.
            function: ``module:function`` (``async def``). It is called with an ``AgentTask`` in this event
                loop and returns its score: a number, or a mapping like that line.
            arguments: Further keyword arguments of the function.
            address: The address of the endpoint; ``node``: the address of this node in its network.
            limits: See ``EndpointLimits``.
            pass_env: Variables that a ``command`` gets although they may hold secrets; see
                ``reward.pass_env``.
        """
        if (command is None) == (function is None):
            raise ValueError(
                "an agent needs environment.arguments.command or .function (module:function), and one of "
                f"them, got command={command!r} and function={function!r}."
            )
        self._run_agent: _Start
        if function is not None:
            if pass_env:
                raise ValueError(f"{_KEY}.pass_env belongs to a command; a function reads os.environ itself.")
            self._name, self._run_agent = function, _function_runner(function, arguments or {})
        else:
            command_line = shlex.split(command) if isinstance(command, str) else list(command or ())
            self._name = shlex.join(command_line)
            self._run_agent = _command_runner(command_line, arguments or {}, pass_env)
        self._address = address
        self._limits = EndpointLimits(**(limits or {}))  # type: ignore[arg-type]
        self._arrivals: asyncio.Queue[_PendingCall] = asyncio.Queue()
        self._endpoint: ChatEndpoint | None = None
        self._calls: list[_PendingCall] = []
        """Calls without an answer, and those answered since the last one came, in the order of arrival."""
        self._num_calls = 0
        self._current: _PendingCall | None = None
        """The call that the next turn answers, or the last turn has answered."""
        self._refusal = ""
        self._is_truncated = False
        """Whether a limit has cut the last turn off."""

    def __repr__(self) -> str:
        """Its name in messages."""
        return f"Agent({self._name}, {self._num_calls} calls)"

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """See ``Environment``. Raises ``RuntimeError`` when the agent ends without a call."""
        endpoint = await ChatEndpoint.get_or_start(self._address, self._limits)
        self._endpoint, self._key = endpoint, endpoint.open(self._answer)
        task = AgentTask(row, seed, endpoint.url, self._key)
        self._agent = asyncio.ensure_future(self._run_agent(task))
        call = await self._next_call()
        if call is None:
            self._require_no_failure()
            raise RuntimeError(f"{self!r} must call its endpoint ({task.base_url}), but has ended without.")
        return Opening(call.messages, call.tools)

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``. Raises ``RuntimeError`` when the agent fails."""
        assert self._current is not None
        current, message = self._current, assistant_message(turn, self._current.call.tools)
        call = None
        if not self._agent.done():  # else it has ended without waiting for this turn
            current.answer.set_result(completion(turn, message))
            self._is_truncated = not turn.stopped
            if self._is_truncated:
                self._refuse_waiting(400, _LIMIT_REACHED)
            call = await self._next_call()
        if call is not None:
            history = [*current.call.messages, plain_message(message)]
            added = call.messages[len(history) :]
            continues = call == ChatCall([*history, *added], current.call.tools)
            if continues and added and not any(message["role"] == "assistant" for message in added):
                return Reply(added)
            return Reply(opening=Opening(call.messages, call.tools), metrics={_BRANCHES: 1.0})
        if self._is_truncated and self._agent.exception() is not None:
            return Reply(truncated=True, metrics={_BRANCHES: 0.0})
        self._require_no_failure()
        ended = self._agent.result()
        score = _score(ended.score, self._name)
        own = {_BRANCHES: 0.0}
        if ended.left_processes:
            own[_LEFT] = float(ended.left_processes)
        metrics = {**own, **score.get("metrics", {}), **own}  # first, as a reply has a limit of metrics
        return Reply(reward=score["reward"], done=True, metrics=metrics)

    async def close(self) -> None:
        """End the agent."""
        if self._endpoint is None:
            return
        self._endpoint.close(self._key)
        self._agent.cancel()
        await asyncio.gather(self._agent, return_exceptions=True)
        self._refuse_waiting(410, "the episode has ended.")

    async def _next_call(self) -> ChatCall | None:
        """The agent's next call. None if it has ended."""
        arrival = asyncio.ensure_future(self._arrivals.get())
        try:
            await asyncio.wait({arrival, self._agent}, return_when=asyncio.FIRST_COMPLETED)
            if self._agent.done():
                return None
            self._current = arrival.result()
            return self._current.call
        finally:
            arrival.cancel()

    def _refuse_waiting(self, status: int, reason: str) -> None:
        """Refuse the calls that wait for a turn."""
        self._arrivals = asyncio.Queue()
        for pending in self._calls:
            if not pending.answer.done():
                pending.answer.set_exception(RefusedCallError(status, reason))
                pending.answer.exception()  # read here, so that asyncio does not log it as never retrieved

    def _require_no_failure(self) -> None:
        error = self._agent.exception()
        if error is not None:
            refused = f" after a call that was refused ({self._refusal})" if self._refusal else ""
            raise RuntimeError(f"{self!r} has failed{refused}: {error!r}") from error

    # for the endpoint

    async def _answer(self, body: Any) -> Mapping[str, Any]:
        """The response to a call. Raises ``RefusedCallError``."""
        try:
            assert self._endpoint is not None
            pending = self._pending(parse_call(body, self._endpoint.named_options))
        except RefusedCallError as refusal:
            self._refusal = str(refusal)
            raise
        pending.is_disconnected = False
        try:
            # A client that disconnects cancels this call, not the answer: it may repeat the call.
            return await asyncio.shield(pending.answer)
        except asyncio.CancelledError:
            pending.is_disconnected = True
            raise

    def _pending(self, call: ChatCall) -> _PendingCall:
        for pending in self._calls:
            if pending.is_disconnected and pending.call == call:
                return pending
        if self._is_truncated:
            raise RefusedCallError(400, _LIMIT_REACHED)
        self._calls = [pending for pending in self._calls if not pending.answer.done()]
        if len(self._calls) >= _MAX_WAITING:
            raise RefusedCallError(429, f"an episode may have {_MAX_WAITING} calls that wait for a turn.")
        self._calls.append(_PendingCall(call))
        self._num_calls += 1
        self._arrivals.put_nowait(self._calls[-1])
        return self._calls[-1]


def _function_runner(name: str, arguments: Mapping[str, Any]) -> _Start:
    """The start of an agent that is a function. Raises ``ValueError`` when there is none."""
    key = f"{_KEY}.function={name}"
    function = import_attribute(name, key, "function")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{key} must be an async function, got {function!r}; start others by a command.")

    async def run(task: AgentTask) -> _Ended:
        return _Ended(await function(task, **arguments))

    return run


def _command_runner(
    command_line: Sequence[str], arguments: Mapping[str, Any], pass_env: Sequence[str]
) -> _Start:
    """The start of an agent that is a process. Raises ``ValueError`` when there is no such command, or a
    variable of ``pass_env`` is not set."""
    if arguments:
        raise ValueError(f"{_KEY}.arguments are those of a function; write them into {_KEY}.command.")
    if not command_line or shutil.which(command_line[0]) is None:
        raise ValueError(
            f"{_KEY}.command must begin with a program that can be run, got {list(command_line)}."
        )

    hidden = secret_variables(os.environ, pass_env, f"{_KEY}.pass_env")

    async def run(task: AgentTask) -> _Ended:
        variables = task.variables()
        if len(variables["VERL_RC_ROW"]) > _MAX_ROW_CHARACTERS:
            raise EpisodeFailedError(
                f"a row must have at most {_MAX_ROW_CHARACTERS} characters of JSON to be a variable of a "
                f"process, got {len(variables['VERL_RC_ROW'])}; put a name into it, by which the agent finds "
                "the data."
            )
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        return await _run_process(command_line, {**inherited, **variables})

    return run


async def _run_process(command_line: Sequence[str], variables: Mapping[str, str]) -> _Ended:
    """The JSON in the last line of output. Raises ``RuntimeError`` when the process fails."""
    report, theirs = os.pipe()
    os.set_blocking(report, False)
    try:
        process = await asyncio.create_subprocess_exec(
            *supervised(command_line, _TAIL_SECONDS, theirs),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=variables,
            pass_fds=[theirs],
            start_new_session=True,  # keys of a terminal do not reach it
        )
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(theirs)
    left = 0
    output, errors = _Tail(process.stdout), _Tail(process.stderr)
    try:
        while process.returncode is None:
            await asyncio.sleep(_POLL_SECONDS)
        with suppress(BlockingIOError):  # something has killed the supervisor
            left = int(os.read(report, 20) or 0)
    finally:
        os.close(report)
        await _end(process)
        await asyncio.wait({output.reading, errors.reading}, timeout=_TAIL_SECONDS)
        output.reading.cancel()
        errors.reading.cancel()
    if process.returncode:
        shown = (errors.text or output.text)[-_MAX_SHOWN_CHARACTERS:]
        raise RuntimeError(f"its process ended with exit code {process.returncode} and wrote: {shown}")
    lines = output.text.splitlines()
    try:
        return _Ended(json.loads(lines[-1] if lines else ""), left)
    except (ValueError, RecursionError):
        return _Ended(lines[-1:], left)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a supervisor, if it is still there, with the agent and all that the agent has started."""
    for end in (process.terminate, process.kill):
        waited = 0.0
        # Before Python 3.13 wait() also waits until the process's outputs are closed.
        while process.returncode is None and waited < _KILL_SECONDS:
            if not waited:
                end()
            await asyncio.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS


class _Tail:
    """The last bytes of a stream, as far as it has been read."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self._bytes = b""
        self.reading = asyncio.ensure_future(self._read(stream))
        """Ends with the stream."""

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_TAIL_BYTES):
            self._bytes = (self._bytes + chunk)[-_TAIL_BYTES:]

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")


def _score(value: Any, name: str) -> Mapping[str, Any]:
    """An agent's score as a mapping. Raises ``EpisodeFailedError`` for any other value."""
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
