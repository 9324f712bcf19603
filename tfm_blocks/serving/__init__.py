"""Serve a trained run over HTTP: requests, batches of concurrent requests, and limits."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_SECONDS = 10.0  # a connection whose request line and headers take longer to arrive is closed
BODY_SECONDS = 10.0  # a body that takes longer to arrive gets status 408
LINGER_SECONDS = 2.0  # for which a refused client's further bytes are read, so that the client can read the error
SEND_SECONDS = 60.0  # a client that accepts no data for this time is disconnected
CLIENT_CLOSED = 499  # status in the metrics for a request whose client disconnected, as in nginx
FINISH_SECONDS = 60  # time for running requests to finish after a stop signal


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the server.

    requests: the maximum number of waiting and running requests; others get status 429. bytes: the maximum size of a
    body. texts: the maximum number of texts of a request. tokens: the maximum number of tokens of a text, and of its
    output. beam: the largest beam. wait: seconds to wait for further requests before a batch starts. batch_tokens:
    the approximate number of source tokens of a batch. connections: the maximum number of open connections; a further
    one replaces the connection that has waited longest for its request.
    """

    requests: int = 512
    bytes: int = 100_000
    texts: int = 64
    tokens: int = 1024
    beam: int = 16
    wait: float = 0.005
    batch_tokens: int = 4096
    connections: int = 4096
