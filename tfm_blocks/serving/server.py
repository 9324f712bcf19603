"""The server process: connections with time limits, the FastAPI app with its routes, and error responses."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tfm_blocks.errors import Problem, config_error
from tfm_blocks.serving import (
    BODY_SECONDS,
    CLIENT_CLOSED,
    FINISH_SECONDS,
    HEAD_SECONDS,
    LINGER_SECONDS,
    SEND_SECONDS,
    Limits,
)
from tfm_blocks.serving.batcher import Batcher, Metrics
from tfm_blocks.serving.requests import (
    FAILURE,
    ClassifyBody,
    EmbedBody,
    FillBody,
    GenerateBody,
    TranslateBody,
    error_of,
    respond,
    stream_response,
)
from tfm_blocks.version import __version__

LOCAL = ["127.0.0.1", "localhost", "[::1]"]
OTHER_FILES = 16  # that the process may open besides connections, now and later
HEADERS = {408: {"Connection": "close"}, 413: {"Connection": "close"}, 429: {"Retry-After": "1"}}


def error_response(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the error response for a problem, with further headers."""
    return JSONResponse({"error": error_of(problem)}, status, {**HEADERS.get(status, {}), **(headers or {})})


async def refuse_body(
    status: int, problem: Problem, scope: Scope, receive: Receive, send: Send, *, arrives: bool = True
) -> None:
    """Send an error. If the body still `arrives`, close when it ends or after LINGER_SECONDS.

    Closing a connection that has unread bytes resets it, and the client may lose the response (RFC 9112, section 9.6).
    """

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await error_response(status, problem)(scope, receive, send_open)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while arrives:
                arrives = (await receive()).get("more_body", False)
    await send({"type": "http.response.body"})


@dataclass
class RequestMiddleware:
    """Reads the whole body before it calls the app, and counts each response."""

    app: ASGIApp
    hosts: Sequence[str]
    limits: Limits
    metrics: Metrics

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
            await refuse_body(408, problem, scope, receive, send)
            return
        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "").lower())
        if len(body) > self.limits.bytes:
            rule = f"must have at most {self.limits.bytes} bytes, a limit of this server"
            problem = Problem("body", rule, help="send fewer texts")
            await refuse_body(413, problem, scope, receive, send, arrives=more)
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
        self.refused = False

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
        """Handle data, and limit the time until the headers are complete. Drop what arrives after a refusal."""
        if not self.refused:
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
        """Send an error and close after LINGER_SECONDS, as refuse_body does; during a response, close now."""
        if self.refused or self.transport.is_closing():
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self.refused = True
        response = error_response(status, problem)
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        with suppress(OSError):  # the client has reset the connection
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def run_server(batcher: Batcher, server_socket: socket.socket, host: str) -> None:
    """Serve on the socket of `host` until SIGTERM or Ctrl-C, then finish the running requests."""
    address, port = server_socket.getsockname()[:2]
    host_part = f"[{address}]" if ":" in address else address
    print(f"serving at http://{host_part}:{port}: stop with Ctrl-C or SIGTERM", flush=True)
    create_server(batcher, address, host).run(sockets=[server_socket])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server_socket = socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: not the name of a host
        rule = f"cannot be used: {host}, port {port} ({error})"
        raise config_error("--host, --port", rule, "--port 0 selects a free port") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        server_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_SECONDS))
    return server_socket


def within_file_limit(limits: Limits) -> Limits:
    """Return the limits with at most as many connections as half of the files that this process can still open.

    asyncio accepts several connections before it closes one, so the other half is for connections that are being
    replaced. Requests get half of the connections, so that a further request gets status 429.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/dev/fd").iterdir())) + OTHER_FILES
    wanted = 2 * limits.connections + used
    allowed, most = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if allowed < wanted:
        allowed = min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    connections = max(2, min(limits.connections, (allowed - used) // 2))
    return replace(limits, connections=connections, requests=min(limits.requests, connections // 2))


def create_server(batcher: Batcher, address: str, host: str) -> uvicorn.Server:
    """Return the server. On a loopback address it refuses other host names, which protects against DNS rebinding."""
    hosts = [*dict.fromkeys((*LOCAL, address, host.lower()))] if ip_address(address).is_loopback else []
    config = uvicorn.Config(
        create_app(batcher, hosts),
        http=partial(Connection, batcher.limits.connections),  # type: ignore[arg-type]
        backlog=max(1, min(1024, batcher.limits.connections // 4)),  # connections that asyncio accepts at once
        log_level="error",  # a warning would be a line for each request that is not HTTP
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return uvicorn.Server(config)


def create_app(batcher: Batcher, hosts: list[str]) -> FastAPI:
    """Return the app, which refuses requests whose Host header is not in `hosts`, unless `hosts` is empty.

    Its shutdown closes the batcher.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)

    app = FastAPI(
        title="tfm serve",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect is not JSON
    )
    app.add_middleware(RequestMiddleware, hosts=hosts, limits=batcher.limits, metrics=batcher.metrics)
    _add_routes(app, batcher)
    _add_error_handlers(app)
    return app


def _add_routes(app: FastAPI, batcher: Batcher) -> None:
    @app.post("/translate")
    async def translate(body: TranslateBody, request: Request) -> Response:
        return await respond(body, request, batcher)

    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        if body.stream:
            return stream_response(body, request, batcher)
        return await respond(body, request, batcher)

    @app.post("/classify")
    async def classify(body: ClassifyBody, request: Request) -> Response:
        return await respond(body, request, batcher)

    @app.post("/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        return await respond(body, request, batcher)

    @app.post("/fill")
    async def fill(body: FillBody, request: Request) -> Response:
        return await respond(body, request, batcher)

    @app.get("/health")
    async def health(response: Response) -> dict[str, object]:
        alive = batcher.thread.is_alive()
        response.status_code = 200 if alive else 503
        state = {"status": "ok" if alive else "the model's thread ended", "sources": batcher.translator.sources}
        return {**state, "version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            generate_latest(batcher.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error as JSON with address, rule and fix, without paths and tracebacks."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        address = ".".join(str(part) for part in first["loc"][1:])
        is_json = "json" in request.headers.get("content-type", "")
        help = "GET /openapi.json lists the keys" if is_json else "send the header Content-Type: application/json"
        return error_response(422, Problem(address, first["msg"], help=help))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        problem: Any = error.detail  # of our own errors; the others are about paths and methods
        if not isinstance(problem, Problem):
            problem = Problem("", problem, help="GET /openapi.json lists the paths")
        return error_response(error.status_code, problem, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(500, FAILURE)
