"""The server process, and the FastAPI app with its routes and error handlers."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.serving import FINISH_SECONDS, SEND_SECONDS, Limits
from tfm_blocks.serving.batcher import Batcher
from tfm_blocks.serving.connections import Connection, RequestMiddleware, error_response
from tfm_blocks.serving.requests import GenerateBody, TranslateBody, respond, stream_response, submit
from tfm_blocks.version import __version__

LOCAL = ["127.0.0.1", "localhost", "[::1]"]
OTHER_FILES = 16  # that the process may open besides connections, now and later


def run_server(batcher: Batcher, server_socket: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the running requests."""
    address, port = server_socket.getsockname()[:2]
    host_part = f"[{address}]" if ":" in address else address
    print(f"serving at http://{host_part}:{port}: stop with Ctrl-C or SIGTERM", flush=True)
    create_server(batcher, address).run(sockets=[server_socket])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server_socket = socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: not the name of a host
        rule = f"cannot be used: {host}, port {port} ({error})"
        raise ConfigError(Problem("--host, --port", rule, help="--port 0 selects a free port")) from None
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


def create_server(batcher: Batcher, address: str) -> uvicorn.Server:
    """Return the server. On a loopback address it refuses other host names, which protects against DNS rebinding."""
    hosts = LOCAL if ip_address(address).is_loopback else []
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
        return await respond(submit(body, batcher), request, batcher.metrics)

    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        if body.stream:
            return stream_response(body, request, batcher)
        return await respond(submit(body, batcher), request, batcher.metrics)

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
        return error_response(500, Problem("", "the server failed", help="its log has the reason"))
