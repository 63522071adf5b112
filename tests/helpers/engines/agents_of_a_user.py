"""Agents for tests: programs that call a chat endpoint by the client of ``openai``."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from openai import APIStatusError, AsyncOpenAI

from verl_rc.runtime.rollout.environments.agent_task import AgentTask

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def client_of(task: AgentTask, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, **options)


async def play(task: AgentTask, turns: int = 2, faults: Mapping[str, int] = {}) -> Any:
    """Asks ``turns`` times, each time with ``h`` behind the answer; its reward is the number of answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"guess {task.row.get('ground_truth')}"}]
    refused: list[str] = []
    async with client_of(task, max_retries=0) as client:

        async def ask(conversation: list[dict[str, Any]], **options: Any) -> Any:
            try:
                answer = await client.chat.completions.create(
                    model="any", messages=conversation, temperature=0.1, **options
                )
            except APIStatusError as error:
                refused.append(f"{error.status_code} {error.body['message']}")
                raise
            return answer.choices[0].message

        for turn in range(turns):
            for fault in [name for name, at in faults.items() if at == turn]:
                await misbehave(fault, ask, messages)
            asking = [ask(messages) for _ in range(1 + (faults.get("twice") == turn))]
            answers = await asyncio.gather(*asking, return_exceptions=True)
            message = answers[0]
            if isinstance(message, BaseException):
                raise message
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "h"}]
    return {"reward": float(turns), "metrics": {"refused": float(len(refused))}} if refused else float(turns)


async def misbehave(fault: str, ask: Any, messages: list[dict[str, Any]]) -> None:
    """Do what an agent must not do, before it asks."""
    other = [{"role": "user", "content": "another conversation"}]
    own = [*messages, {"role": "assistant", "content": "mine"}, {"role": "user", "content": "x"}]
    if fault == "raise":
        raise RuntimeError("the sandbox was lost")
    if fault == "silent":
        await asyncio.sleep(3600)
    if fault == "other":
        await ask(other)
    if fault == "gives up":
        calling = asyncio.ensure_future(ask(other))
        await asyncio.sleep(0.2)
        calling.cancel()
    if fault == "dies of a refusal":
        await ask(messages, stop=["x"])
    edited = [*messages[:-2], {"role": "assistant", "content": "edited"}, messages[-1]]
    tried = {"edited": (edited, {}), "own words": (own, {}), "n": (messages, {"n": 2})}
    if fault in tried:
        conversation, options = tried[fault]
        with suppress(APIStatusError):
            await ask(conversation, **options)


async def add(task: AgentTask) -> float:
    """Answers a call of its tool, and is pleased by the right sum."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2+3"}]
    async with client_of(task) as client:
        choice = (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0]
        if choice.finish_reason != "tool_calls":
            return 0.0
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        answer = {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}
        messages += [choice.message.model_dump(), answer]
        last = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    return float(last.choices[0].message.content == "5")


async def hurried(task: AgentTask) -> float:
    """Asks twice at once, and ends with the first answer."""
    async with client_of(task) as client:
        asking = [
            asyncio.ensure_future(
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            )
            for text in ("a", "b")
        ]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for one in asking:
            one.cancel()
    return 3.0


async def mute(task: AgentTask) -> float:
    return 1.0


async def impatient(task: AgentTask) -> float:
    """Loses patience with its call, and calls again."""
    async with client_of(task, timeout=0.3, max_retries=50) as client:
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "guess"}]
        )
    return float(answer.choices[0].message.content == "7")


def not_async(task: AgentTask) -> float:
    return 1.0


def main() -> None:
    task = AgentTask.from_variables(os.environ)
    faults = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    print("it writes what it likes")
    try:
        score = asyncio.run(play(task, faults=faults))
    finally:
        if "stubborn" in faults:
            time.sleep(600)
    print(json.dumps(score if isinstance(score, dict) else {"reward": score}))


if __name__ == "__main__":
    main()
