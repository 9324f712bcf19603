"""Error responses: an address, a rule and a fix, without paths and tracebacks."""

from __future__ import annotations

from starlette.responses import JSONResponse

from tfm_blocks.errors import Problem

HEADERS = {408: {"Connection": "close"}, 413: {"Connection": "close"}, 429: {"Retry-After": "1"}}


class RequestRefusedError(Exception):
    """Signals that a request gets an error response."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.rule)
        self.status, self.problem = status, problem


def error_body(problem: Problem) -> dict[str, object]:
    """Return the body of an error response."""
    return {"error": {"address": problem.address, "rule": problem.rule, "help": problem.help}}


def error_response(status: int, problem: Problem) -> JSONResponse:
    """Return the error response for a problem."""
    return JSONResponse(error_body(problem), status, HEADERS.get(status))
