"""The FastAPI app: routes and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tfm_blocks import __version__
from tfm_blocks.errors import Problem
from tfm_blocks.serving.batcher import Batcher
from tfm_blocks.serving.errors import RequestRefusedError, error_response
from tfm_blocks.serving.middleware import RequestMiddleware
from tfm_blocks.serving.requests import GenerateBody, TranslateBody, submit
from tfm_blocks.serving.responses import respond, stream_response


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
    _add_text_routes(app, batcher)
    _add_status_routes(app, batcher)
    _add_error_handlers(app)
    return app


def _add_text_routes(app: FastAPI, batcher: Batcher) -> None:
    @app.post("/translate")
    async def translate(body: TranslateBody, request: Request) -> Response:
        return await respond(submit(body, batcher), request, batcher.metrics)

    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        if body.stream:
            return stream_response(body, request, batcher)
        return await respond(submit(body, batcher), request, batcher.metrics)


def _add_status_routes(app: FastAPI, batcher: Batcher) -> None:
    translator = batcher.translator

    @app.get("/health")
    async def health(response: Response) -> dict[str, object]:
        alive = batcher.thread.is_alive()
        response.status_code = 200 if alive else 503
        state = {"status": "ok" if alive else "the model's thread ended", "sources": translator.sources}
        return {**state, "version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(batcher.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error as JSON with address, rule and fix, without paths and tracebacks."""

    @app.exception_handler(RequestRefusedError)
    async def refused(request: Request, error: RequestRefusedError) -> Response:
        return error_response(error.status, error.problem)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        address = ".".join(str(part) for part in first["loc"][1:])
        is_json = "json" in request.headers.get("content-type", "")
        help = "GET /openapi.json lists the keys" if is_json else "send the header Content-Type: application/json"
        return error_response(422, Problem(address, first["msg"], help=help))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        problem = Problem("", error.detail, help="GET /openapi.json lists the paths")
        return error_response(error.status_code, problem, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(500, Problem("", "the server failed", help="its log has the reason"))
