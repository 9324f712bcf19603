"""Connections and error responses: time limits, a maximum of connections, the size of bodies, and counted responses."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tfm_blocks.errors import Problem, printable
from tfm_blocks.serving import BODY_SECONDS, CLIENT_CLOSED, HEAD_SECONDS, Limits
from tfm_blocks.serving.batcher import Metrics

HEADERS = {408: {"Connection": "close"}, 413: {"Connection": "close"}, 429: {"Retry-After": "1"}}


def error_of(problem: Problem) -> dict[str, str]:
    """Return the JSON of a problem, without lone surrogates, which keys of a request may contain and UTF-8 lacks."""
    return {name: printable(getattr(problem, name)) for name in ("address", "rule", "help")}


def error_response(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the error response for a problem, with further headers."""
    return JSONResponse({"error": error_of(problem)}, status, {**HEADERS.get(status, {}), **(headers or {})})


class RequestMiddleware:
    """Reads the whole body before it calls the app, and counts each response."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str], limits: Limits, metrics: Metrics) -> None:
        self.app, self.hosts, self.limits, self.metrics = app, hosts, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), CLIENT_CLOSED

        async def send_counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._respond(scope, receive, send_counted)
        except Exception:
            status = 500
            raise
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.observe(time.perf_counter() - start)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and len(body) <= self.limits.bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body, more = body + message.get("body", b""), message.get("more_body", False)
        except TimeoutError:
            problem = Problem("body", f"must arrive within {BODY_SECONDS:g} s", help="send it faster")
            await error_response(408, problem)(scope, receive, send)
            return
        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "").lower())
        if len(body) > self.limits.bytes:
            rule = f"must have at most {self.limits.bytes} bytes, a limit of this server"
            await error_response(413, Problem("body", rule, help="send fewer texts"))(scope, receive, send)
        elif self.hosts and host not in self.hosts:
            problem = Problem("Host", f"must be one of {', '.join(self.hosts)}", help="tfm serve --host 0.0.0.0")
            await error_response(400, problem)(scope, receive, send)
        else:
            messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, send)


class Connection(H11Protocol):
    """A connection of at most `most`. A further one replaces the connection that has waited longest for its request.

    It closes if the request line and headers of a request take longer than HEAD_SECONDS. uvicorn closes it after 5 s
    without a byte of its next request.
    """

    def __init__(self, most: int, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.most = most
        self.waiting_since = self.loop.time()
        self.head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit, and close the connection that has waited longest if there are too many."""
        super().connection_made(transport)
        self._limit_head()
        if len(self.connections) > self.most:
            others = [other for other in self.connections if isinstance(other, Connection)]
            waiting = [other for other in others if other.conn.their_state in (h11.IDLE, h11.SEND_BODY)]
            oldest = min(waiting, key=lambda other: other.waiting_since)  # at least this connection
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle data, and limit the time until the headers are complete."""
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        super().connection_lost(exc)
        if self.head_timer:
            self.head_timer.cancel()

    def _limit_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            if self.head_timer:
                self.head_timer.cancel()
            self.head_timer = None
        elif self.head_timer is None:
            rule = f"the request line and headers must arrive within {HEAD_SECONDS:g} s"
            problem = Problem("", rule, help="send them faster")
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, problem)

    def send_400_response(self, msg: str) -> None:
        """Send an error for bytes that are not HTTP."""
        self._refuse(400, Problem("", msg, help="send HTTP/1.1 requests with headers of at most 64 KB"))

    def _refuse(self, status: int, problem: Problem) -> None:
        """Send an error, unless a response was started, and close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(status, problem)
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
