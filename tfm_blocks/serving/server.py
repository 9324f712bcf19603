"""The server process."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import uvicorn

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.serving.app import create_app
from tfm_blocks.serving.batcher import Batcher
from tfm_blocks.serving.settings import FINISH_SECONDS

LOCAL = ["127.0.0.1", "localhost", "[::1]"]


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
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: not the name of a host
        rule = f"cannot be used: {host}, port {port} ({error})"
        raise ConfigError(Problem("--host, --port", rule, help="--port 0 selects a free port")) from None


def create_server(batcher: Batcher, address: str) -> uvicorn.Server:
    """Return the server. On a loopback address it refuses other host names, which protects against DNS rebinding."""
    hosts = LOCAL if ip_address(address).is_loopback else ["*"]
    config = uvicorn.Config(
        create_app(batcher, hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return uvicorn.Server(config)
