"""The server process."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import uvicorn

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.serving.app import app_of
from tfm_blocks.serving.batcher import Batcher
from tfm_blocks.serving.settings import FINISH_SECONDS

LOCAL = ["127.0.0.1", "localhost", "[::1]"]


def run_server(batcher: Batcher, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the running requests. Raises ConfigError for an unusable address."""
    with listen(host, port) as listening:
        address, port = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"http://{shown}:{port} serves; Ctrl-C or SIGTERM stops", flush=True)
        server_of(batcher, address).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        rule = f"cannot be used: {host}, port {port} ({error})"
        raise ConfigError(Problem("--host, --port", rule, help="--port 0 takes a free port")) from None


def server_of(batcher: Batcher, address: str) -> uvicorn.Server:
    """Return the server. On an address of this machine only, it refuses foreign names, which resolve to it."""
    hosts = LOCAL if ip_address(address).is_loopback else ["*"]
    config = uvicorn.Config(
        app_of(batcher, hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return uvicorn.Server(config)
