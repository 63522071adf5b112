"""An OpenAI-compatible chat endpoint that this process serves to agents, one for each event loop."""

import asyncio
import json
import logging
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.http import HttpProcessingError

from verl_rc.runtime.rollout.environments.chat import RefusedCallError

Answer = Callable[[Any], Awaitable[Mapping[str, Any]]]
"""Returns the response to the body of a call. Raises ``RefusedCallError``."""
_PATH = "/v1/chat/completions"
_MAX_ENDED_KEYS = 10_000
"""Number of keys of ended episodes that are remembered."""
_KEEPALIVE_SECONDS = 15.0
_HEADER_SECONDS = 5.0
"""Time in which a new connection must have sent the header of a request."""
_MIB = 1 << 20
_RETRYABLE_STATUSES = (429, 503)
"""Refusals after which the same call may succeed."""


@dataclass(frozen=True)
class EndpointLimits:
    """Limits of an endpoint."""

    body_megabytes: float = 8.0
    """Largest body of a call, MiB."""
    connections: int = 512
    """Largest number of concurrent connections."""
    calls_per_second: int = 100
    """Largest rate of one key; all wrong keys count as one."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a limit that is not above 0."""
        if problems := [f"{name}={limit}" for name, limit in vars(self).items() if not limit > 0]:
            raise ValueError(f"limits of an agent's endpoint must be above 0, got {', '.join(problems)}.")


class ChatEndpoint:
    """A server in this event loop. Every episode has a key of its own, which identifies its calls."""

    def __init__(self, address: str, limits: EndpointLimits) -> None:
        self._address = _own_address() if address == "node" else address
        self._limits = limits
        self._answers: dict[str, Answer] = {}
        self._ended: deque[str] = deque(maxlen=_MAX_ENDED_KEYS)
        self._current_second = 0
        self._calls: Counter[str] = Counter()
        """Calls in ``_current_second``, by key."""
        # A call is cancelled when its client disconnects.
        self._web = _BoundedServer(
            limits.connections,
            self._respond,
            logger=_Faults(),
            request_factory=partial(
                web.BaseRequest,
                loop=asyncio.get_running_loop(),
                client_max_size=int(limits.body_megabytes * _MIB),
            ),
            handler_cancellation=True,
            keepalive_timeout=_KEEPALIVE_SECONDS,
            access_log=None,
        )
        self.url = ""
        """The ``base_url`` of clients."""
        self.named_options: set[str] = set()
        """Options of calls that were warned of."""

    @classmethod
    async def get_or_start(cls, address: str, limits: EndpointLimits) -> "ChatEndpoint":
        """The endpoint of the running event loop at an ``address`` (``node``: the one that other nodes
        reach); the first call starts it."""
        loop = asyncio.get_running_loop()
        endpoints = _ENDPOINTS.setdefault(loop, {})
        if address not in endpoints:
            endpoints[address] = loop.create_task(cls(address, limits)._start())
        return await asyncio.shield(endpoints[address])

    async def _start(self) -> "ChatEndpoint":
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._web, self._address, 0, backlog=self._limits.connections)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    def open(self, answer: Answer) -> str:
        """Begin an episode whose calls ``answer`` answers; returns its key."""
        key = secrets.token_urlsafe(32)
        self._answers[key] = answer
        return key

    def close(self, key: str) -> None:
        """End the episode of a key: further calls are refused."""
        if self._answers.pop(key, None) is not None:
            self._ended.append(key)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        with self._web.working(request.protocol):
            try:
                return web.json_response(await self._call(request))
            except RefusedCallError as refusal:
                may_retry = "true" if refusal.status in _RETRYABLE_STATUSES else "false"
                body = _error_body(str(refusal))
                return web.json_response(body, status=refusal.status, headers={"x-should-retry": may_retry})

    async def _call(self, request: web.BaseRequest) -> Mapping[str, Any]:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        answer = self._answers.get(key)
        self._require_rate(key if answer is not None else "")
        if answer is None and key in self._ended:
            raise RefusedCallError(410, "the episode of this key has ended.")
        if answer is None:
            raise RefusedCallError(401, "the key must be that of a running episode (OPENAI_API_KEY).")
        if (request.method, request.path) != ("POST", _PATH):
            raise RefusedCallError(
                404, f"this endpoint has POST {_PATH}, got {request.method} {request.path}."
            )
        try:
            body = json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge:
            limit = f"{self._limits.body_megabytes:g} MiB"
            raise RefusedCallError(413, f"a body must have at most {limit}.") from None
        except (ValueError, RecursionError, web.RequestPayloadError) as error:
            raise RefusedCallError(400, f"the body must be JSON: {error}.") from error
        return await answer(body)

    def _require_rate(self, key: str) -> None:
        second = int(time.monotonic())
        if second != self._current_second:
            self._current_second, self._calls = second, Counter()
        self._calls[key] += 1
        if self._calls[key] > self._limits.calls_per_second:
            raise RefusedCallError(429, f"a key may make {self._limits.calls_per_second} calls a second.")


_ENDPOINTS: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[ChatEndpoint]]]" = (
    WeakKeyDictionary()
)
"""Endpoints by event loop and address: a server belongs to the loop that it was started in."""


class _BoundedServer(web.Server):
    """A server with a limit of connections. A further one takes the place of the one that has been idle for
    longest; when all are working, it gets status 503 and is closed."""

    def __init__(self, max_connections: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._max_connections = max_connections
        self._idle: dict[web.RequestHandler, None] = {}
        """Connections whose request has not come yet, the oldest first."""
        self._silent: set[web.RequestHandler] = set()
        """Connections that have never sent a request."""
        self._working: set[web.RequestHandler] = set()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Accept or refuse a new connection."""
        if len(self._idle) + len(self._working) >= self._max_connections:
            if not self._idle:
                self._refuse(transport)
                return
            self._close(next(iter(self._idle)))
        super().connection_made(handler, transport)
        self._idle[handler] = None
        self._silent.add(handler)
        asyncio.get_running_loop().call_later(_HEADER_SECONDS, self._close_if_silent, handler)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        self._forget(handler)
        super().connection_lost(handler, exc)

    @contextmanager
    def working(self, handler: web.RequestHandler) -> Iterator[None]:
        """The time in which a request is answered: its connection stays open."""
        is_open = handler in self._idle
        self._forget(handler)
        if is_open:
            self._working.add(handler)
        try:
            yield
        finally:
            if handler in self._working:
                self._forget(handler)
                self._idle[handler] = None

    def _forget(self, handler: web.RequestHandler) -> None:
        self._idle.pop(handler, None)
        self._silent.discard(handler)
        self._working.discard(handler)

    def _close(self, handler: web.RequestHandler) -> None:
        self._forget(handler)
        handler.force_close()

    def _close_if_silent(self, handler: web.RequestHandler) -> None:
        if handler in self._silent:
            self._close(handler)

    def _refuse(self, transport: asyncio.Transport) -> None:
        message = f"this endpoint has {self._max_connections} connections, and takes no more at once."
        body = json.dumps(_error_body(message))
        transport.write(
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        transport.close()


class _Faults(logging.Logger):
    """The log of a server. Of requests that are no HTTP it has one line with their number, at the first, the
    tenth, the hundredth and so on."""

    def __init__(self) -> None:
        super().__init__("verl_rc.agents_endpoint")
        self.parent = logging.getLogger("verl_rc")
        self._count = 0

    def exception(self, msg: object, *arguments: Any, exc_info: Any = True, **options: Any) -> None:
        """Log an exception with its traceback, if it is no client's fault."""
        if not isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            super().exception(msg, *arguments, exc_info=exc_info, **options)
            return
        self._count += 1
        if str(self._count).strip("0") == "1":
            self.warning("the agents' endpoint has had %d requests that are no HTTP", self._count)


def _error_body(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _own_address() -> str:
    """The address of this node in its network; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
