"""The outermost layer of the server: bodies of bounded size and time, and metrics of each response."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfm_blocks.errors import Problem
from tfm_blocks.serving.metrics import Metrics
from tfm_blocks.serving.refusal import error_response
from tfm_blocks.serving.settings import BODY_SECONDS, CLIENT_LEFT, Limits


class Entrance:
    """Reads each body before the app sees the request, and counts the responses."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), CLIENT_LEFT

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        except Exception:
            status = 500
            raise
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.observe(time.perf_counter() - begin)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(receive)
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
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body, None if the client left, or the first bytes that are more than the limit."""
        body = b""
        while len(body) <= self.limits.bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        return body
