"""A connection: time limits, a maximum number, and JSON for bytes that are not HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tfm_blocks.errors import Problem
from tfm_blocks.serving.errors import error_response
from tfm_blocks.serving.settings import HEAD_SECONDS


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

    @property
    def is_waiting(self) -> bool:
        """Return True until the headers and the body of a request are complete."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit, and close the connection that has waited longest if there are too many."""
        super().connection_made(transport)
        self._limit_head()
        if len(self.connections) > self.most:
            waiting = [other for other in self.connections if isinstance(other, Connection) and other.is_waiting]
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
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._end_head)

    def _end_head(self) -> None:
        rule = f"the request line and headers must arrive within {HEAD_SECONDS:g} s"
        self._refuse(408, Problem("", rule, help="send them faster"))

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
