"""An environment of the package ``verifiers`` (0.4) as an agent.

A function where ``verifiers`` is installed beside the trainer (``verl_rc[verifiers]``), else a process in an
environment of its own:
``python -m verl_rc.runtime.rollout.environments.verifiers_agent '{"taskset": {"id": ...}}'``.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from httpx import AsyncClient
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from verl_rc.runtime.rollout.environments.agent_task import AgentTask

__all__ = ["ChatHarness", "play"]

_CHAT = "verl_rc_chat"
sys.modules[_CHAT] = sys.modules[__name__]  # verifiers finds a harness by the name of a top-level module
_SEAT = {"harness": {"id": _CHAT}, "runtime": {"type": "subprocess"}}


class ChatConfig(vf.HarnessConfig):  # type: ignore[misc]
    """A harness without options of its own."""


class ChatHarness(vf.Harness[ChatConfig]):  # type: ignore[misc]
    """A chat completion for every segment, from this process: for tasks without tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> ProgramResult:
        """See ``Harness``."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        body = {"model": ctx.model, "messages": messages}
        async with AsyncClient(timeout=None) as client:  # a turn may have to wait for new weights
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return ProgramResult(int(answer.is_error), answer.text, answer.text if answer.is_error else "")


async def play(task: AgentTask, environment: Mapping[str, Any]) -> dict[str, float]:
    """Play the task of the row's ``extra_info.index`` in one episode; returns the reward of its traces.

    ``environment`` is an environment's configuration in the format of verifiers: ``{"taskset": {"id":
    ...}}``. A seat without a configuration makes one chat completion a turn. Raises ``RuntimeError`` when the
    episode fails.
    """
    loop = asyncio.get_running_loop()
    server = await asyncio.shield(_environment_server(loop, json.dumps(environment, sort_keys=True)))
    variable = f"VERL_RC_KEY_{task.api_key}"  # verifiers reads keys from variables alone
    os.environ[variable] = task.api_key
    try:
        client = EvalClientConfig(base_url=task.base_url, api_key_var=variable)
        episode = await server.environment.run_episode(
            server.task(task.row["extra_info"]["index"]), ModelContext("policy", client)
        )
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"the episode of verifiers failed: {[error.message for error in errors]}")
    return {"reward": sum(trace.reward for trace in episode.traces)}


class _EnvironmentServer:
    """An environment, served to the episodes of this event loop, and its tasks."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        seats = dict.fromkeys(agent_config_fields(resolve_env_config(dict(configuration))), _SEAT)
        self.environment = load_environment(resolve_env_config({**seats, **configuration}))
        self._unread_tasks = iter(self.environment.taskset)
        self._tasks: list[Any] = []

    def task(self, index: int) -> Any:
        """The task at an index of the set, which may be infinite."""
        self._tasks.extend(islice(self._unread_tasks, max(0, index + 1 - len(self._tasks))))
        return self._tasks[index]

    async def serve(self, ready: "asyncio.Future[_EnvironmentServer]") -> None:
        """Serve until the end of the loop."""
        async with self.environment.serving():
            ready.set_result(self)
            await asyncio.Event().wait()


@cache
def _environment_server(
    loop: asyncio.AbstractEventLoop, configuration: str
) -> "asyncio.Future[_EnvironmentServer]":
    """One server for all episodes of a loop: starting one costs more than an episode."""
    ready: asyncio.Future[_EnvironmentServer] = loop.create_future()
    serve_task = loop.create_task(_EnvironmentServer(json.loads(configuration)).serve(ready))
    _SERVE_TASKS.add(serve_task)  # the loop itself keeps no task alive

    def report_failure(ended_task: "asyncio.Task[None]") -> None:
        error = None if ended_task.cancelled() else ended_task.exception()
        if error is not None and not ready.done():
            ready.set_exception(error)

    serve_task.add_done_callback(report_failure)
    return ready


_SERVE_TASKS: set[Any] = set()

if __name__ == "__main__":
    score = asyncio.run(play(AgentTask.from_variables(os.environ), json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(score))
