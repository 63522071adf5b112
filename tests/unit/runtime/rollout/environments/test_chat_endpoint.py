"""The endpoint of agents: who may call it, how much, and how it says no."""

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from verl_rc.runtime.rollout.environments import chat_endpoint
from verl_rc.runtime.rollout.environments.chat import RefusedCallError, parse_call
from verl_rc.runtime.rollout.environments.chat_endpoint import ChatEndpoint, EndpointLimits

CALL = {"messages": [{"role": "user", "content": "x"}]}
Check = Callable[[ChatEndpoint, aiohttp.ClientSession, str], Awaitable[Any]]


def with_endpoint(check: Check, **limits: Any) -> Any:
    """What ``check`` gives, with an endpoint, a client and the key of an episode that echoes its body."""

    async def echo(body: Any) -> Any:
        return {"echo": body}

    async def run() -> Any:
        endpoint = await ChatEndpoint.get_or_start("127.0.0.1", EndpointLimits(**limits))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client:
            return await check(endpoint, client, endpoint.open(echo))

    return asyncio.run(run())


async def called(
    endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str, data: Any = None, path: str = ""
) -> tuple[int, str]:
    """Status and message of a call; a message that is no error is the body."""
    url = endpoint.url + (path or "/chat/completions")
    body = json.dumps(CALL) if data is None else data
    async with client.post(url, data=body, headers={"Authorization": f"Bearer {key}"}) as response:
        answer = await response.json()
        return response.status, answer["error"]["message"] if "error" in answer else json.dumps(answer)


def test_an_episode_is_found_by_its_key_as_long_as_it_is_open() -> None:
    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        assert await ChatEndpoint.get_or_start("127.0.0.1", EndpointLimits()) is endpoint
        assert await called(endpoint, client, key) == (200, json.dumps({"echo": CALL}))
        for other in ("", "x", key[:-1]):
            assert await called(endpoint, client, other) == (
                401,
                "the key must be that of a running episode (OPENAI_API_KEY).",
            )
        endpoint.close(key)
        assert await called(endpoint, client, key) == (410, "the episode of this key has ended.")

    with_endpoint(check)


@pytest.mark.parametrize(
    ("data", "path", "status", "why"),
    [
        (b"x" * (100 << 20), "", 413, "a body must have at most 1 MiB."),
        (b"{", "", 400, "the body must be JSON"),
        (b"[" * 100_000, "", 400, "the body must be JSON"),
        (b"{}", "/embeddings", 404, "this endpoint has POST /v1/chat/completions, got POST /v1/embeddings."),
    ],
)
def test_what_is_no_call_is_refused_in_a_sentence(data: bytes, path: str, status: int, why: str) -> None:
    async def chunks() -> Any:
        for start in range(0, len(data), 1 << 16):
            yield data[start : start + (1 << 16)]

    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        assert (await called(endpoint, client, "x", data, path))[0] == 401  # before a body is read
        answer = await called(endpoint, client, key, data, path)
        assert (answer[0], answer[1][: len(why)]) == (status, why)
        assert (await called(endpoint, client, key))[0] == 200  # and it goes on

    async def check_without_length(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> int:
        try:
            return (await called(endpoint, client, key, chunks(), path))[0]
        except aiohttp.ClientError:  # the connection is closed while the body is still on its way
            return status

    with_endpoint(check, body_megabytes=1.0)
    assert with_endpoint(check_without_length, body_megabytes=1.0) == status


def test_a_key_may_call_so_often_a_second_and_wrong_keys_take_no_others_calls() -> None:
    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        await asyncio.sleep(1 - asyncio.get_running_loop().time() % 1)  # a second begins
        wrong = [(await called(endpoint, client, f"wrong {place}"))[0] for place in range(12)]
        assert set(wrong) == {401, 429}
        statuses = [await called(endpoint, client, key) for _ in range(12)]
        assert statuses[0][0] == 200
        assert (429, "a key may make 5 calls a second.") in statuses

    with_endpoint(check, calls_per_second=5)


async def connected(endpoint: ChatEndpoint, data: bytes = b"") -> asyncio.StreamReader:
    """A connection that has sent ``data`` and stays silent then."""
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    reader._held = writer  # type: ignore[attr-defined]  (else the connection ends)
    return reader


def test_idle_connections_make_room_the_oldest_first() -> None:
    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        held = [await connected(endpoint, b"POST / HTTP/1.1\r\nA: ") for _ in range(200)]
        assert (await called(endpoint, client, key))[0] == 200
        for reader in held[:180]:
            assert await reader.read() == b""
        assert not any(reader.at_eof() for reader in held[181:])
        assert len(endpoint._web.connections) <= 20

    with_endpoint(check, connections=20)


def test_calls_beyond_the_limit_of_connections_are_told_so_and_keep_theirs() -> None:
    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        begun, go_on = 0, asyncio.Event()

        async def wait(body: Any) -> Any:
            nonlocal begun
            begun += 1
            await go_on.wait()
            return {}

        slow = endpoint.open(wait)
        calls = [asyncio.ensure_future(called(endpoint, client, slow)) for _ in range(20)]
        while begun < 20:
            await asyncio.sleep(0.01)
        status, why = await called(endpoint, client, key)
        assert (status, why) == (503, "this endpoint has 20 connections, and takes no more at once.")
        go_on.set()
        assert await asyncio.gather(*calls) == [(200, "{}")] * 20
        assert (await called(endpoint, client, key))[0] == 200

    with_endpoint(check, connections=20)


def test_who_sends_no_header_is_disconnected_and_who_has_called_may_stay_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_endpoint, "_HEADER_SECONDS", 0.2)

    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        call = f"POST /v1/x HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: 0\r\n\r\n"
        caller = await connected(endpoint, call.encode())
        assert (await caller.readuntil(b"}}")).startswith(b"HTTP/1.1 404")
        silent = [await connected(endpoint), await connected(endpoint, b"POST / HTTP/1.1\r\nA: b\r\n")]
        for reader in silent:
            assert await reader.read() == b""
        assert not caller.at_eof()
        assert len(endpoint._web.connections) == 1

    with_endpoint(check)


def test_what_is_no_http_is_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def check(endpoint: ChatEndpoint, client: aiohttp.ClientSession, key: str) -> None:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        for data in (
            b"\x16\x03\x01\x02\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
            b"POST / HTTP/1.1\r\nno header\r\n\r\n",
        ):
            for _ in range(4):
                await (await connected(endpoint, data)).read()
        for body in (
            "Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
            "Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnone",
        ):
            answer = await connected(endpoint, (head + body).encode())
            assert b" 400 " in await answer.readuntil(b"\r\n")

    with_endpoint(check)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("verl_rc")]
    assert 1 <= len(lines) <= 2
    assert all(line.endswith("requests that are no HTTP") for line in lines)
    assert "Traceback" not in caplog.text


def test_options_without_effect_are_warned_of_up_to_five() -> None:
    named: set[str] = set()
    body = {**CALL, "top_p": 0.5, "seed": 3}
    with pytest.warns(UserWarning, match="^seed, top_p of an agent's calls have no effect"):
        parse_call(body, named)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parse_call(body, named)
        parse_call({**CALL, **{f"{'x' * 1000}{number}": 1 for number in range(40_000)}}, named)
        parse_call({**CALL, "another": 1}, named)
    (warning,) = caught
    assert str(warning.message).count(" and 39997 more of an agent's calls have no effect") == 1
    assert len(str(warning.message)) < 1000
    assert len(named) == 5


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "the body must be a JSON object"),
        ({}, "messages must be a list"),
        ({"messages": []}, "messages must be a list with at least one"),
        ({"messages": ["x"]}, "the role of a message must be one of"),
        ({"messages": [{"role": "function", "content": "x"}]}, "the role of a message must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "must be text"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "a tool call must be"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "a tool call must be"),
        ({"messages": [USER], "tools": "x"}, "tools must be a list"),
        ({"messages": [USER], "n": 2}, "n must be left out, got 2"),
        ({"messages": [USER], "stream": True}, "stream must be left out"),
        ({"messages": [USER], "stop": ["."]}, "stop must be left out"),
        ({"messages": [USER], "logit_bias": {"5": 1}}, "logit_bias must be left out"),
        (
            {"messages": [USER], "response_format": {"type": "json_object"}},
            "response_format must be left out",
        ),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice must be left out"),
    ],
)
def test_a_body_that_is_no_call_is_refused(body: Any, why: str) -> None:
    with pytest.raises(RefusedCallError, match=why) as refusal:
        parse_call(body)
    assert refusal.value.status == 400


def test_messages_have_one_form() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"b": 1}'}}
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "content": "7", "tool_call_id": "a"},
    ]
    plain = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"b": 1}}}
    assert parse_call({"messages": said}).messages == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [plain]},
        {"role": "tool", "content": "7", "tool_call_id": "a"},
    ]
