"""Error responses: an address, a rule and a fix, without paths and tracebacks."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from tfm_blocks.errors import Problem, printable

HEADERS = {408: {"Connection": "close"}, 413: {"Connection": "close"}, 429: {"Retry-After": "1"}}


class RequestRefusedError(Exception):
    """Signals that a request gets an error response."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.rule)
        self.status, self.problem = status, problem


def error_of(problem: Problem) -> dict[str, str]:
    """Return the JSON of a problem, without lone surrogates, which keys of a request may contain and UTF-8 lacks."""
    return {name: printable(getattr(problem, name)) for name in ("address", "rule", "help")}


def error_body(problem: Problem) -> dict[str, object]:
    """Return the body of an error response."""
    return {"error": error_of(problem)}


def error_response(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the error response for a problem, with further headers."""
    return JSONResponse(error_body(problem), status, {**HEADERS.get(status, {}), **(headers or {})})
