"""The middleware of the server: it checks the Host header, limits the size and time of a body, and counts responses."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfm_blocks.errors import Problem
from tfm_blocks.serving.errors import error_response
from tfm_blocks.serving.metrics import Metrics
from tfm_blocks.serving.settings import BODY_SECONDS, CLIENT_CLOSED, Limits


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
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read_body(receive)
        except TimeoutError:
            problem = Problem("body", f"must arrive within {BODY_SECONDS:g} s", help="send it faster")
            await error_response(408, problem)(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self.limits.bytes:
            rule = f"must have at most {self.limits.bytes} bytes, a limit of this server"
            await error_response(413, Problem("body", rule, help="send fewer texts"))(scope, receive, send)
            return
        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "").lower())
        if self.hosts and host not in self.hosts:
            problem = Problem("Host", f"must be one of {', '.join(self.hosts)}", help="tfm serve --host 0.0.0.0")
            await error_response(400, problem)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected. Stops reading as soon as the body exceeds the limit."""
        body = b""
        while len(body) <= self.limits.bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        return body
