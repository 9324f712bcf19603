"""Limits of the server, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

BODY_SECONDS = 10.0  # a client that sends more slowly gets status 408
CLIENT_LEFT = 499  # the status of a request whose client left, in the metrics
FINISH_SECONDS = 60  # after a stop signal, running requests have this time


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the server.

    requests: requests that wait or run; further ones get status 429. bytes: the size of a request's body. texts: the
    texts of a request. tokens: the tokens of a text and of its output. beam: the largest beam. wait: seconds to wait
    for further requests before a batch starts. batch_tokens: the approximate source tokens of a batch.
    """

    requests: int = 512
    bytes: int = 100_000
    texts: int = 64
    tokens: int = 1024
    beam: int = 16
    wait: float = 0.005
    batch_tokens: int = 4096
