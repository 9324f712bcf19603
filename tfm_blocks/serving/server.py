"""The server process."""

from __future__ import annotations

import resource
import socket
import sys
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.serving.app import create_app
from tfm_blocks.serving.batcher import Batcher
from tfm_blocks.serving.connection import Connection
from tfm_blocks.serving.settings import FINISH_SECONDS, SEND_SECONDS, Limits

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
