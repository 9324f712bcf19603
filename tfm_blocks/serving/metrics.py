"""Prometheus metrics of the server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tfm_requests", "Responses by path and status", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tfm_request_seconds", "Seconds from the request to the end of its response", registry=self.registry
        )
        self.running = Gauge("tfm_requests_running", "Requests that wait or run", registry=self.registry)
        self.cancelled = Counter("tfm_requests_cancelled", "Requests whose client disconnected", registry=self.registry)
        sizes = [2**power for power in range(10)]
        self.batch_texts = Histogram("tfm_batch_texts", "Texts per batch", buckets=sizes, registry=self.registry)
        self.tokens = Counter("tfm_output_tokens", "Tokens of the best outputs", registry=self.registry)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
