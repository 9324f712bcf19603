"""Responses of jobs, as a whole or piece by piece; a client that leaves cancels its job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager

from fastapi import Request, Response
from starlette.responses import JSONResponse, StreamingResponse

from tfm_blocks.errors import TfmError
from tfm_blocks.serving.batcher import Batcher, Job, Outputs
from tfm_blocks.serving.metrics import Metrics
from tfm_blocks.serving.refusal import error_record, error_response
from tfm_blocks.serving.requests import GenerateBody, submit
from tfm_blocks.serving.settings import CLIENT_LEFT
from tfm_blocks.translation.translator import Translator


async def answer(job: Job, request: Request, metrics: Metrics) -> Response:
    """Return the outputs of a job."""
    async with cancelled_if_left(job, request, metrics):
        try:
            outputs = await asyncio.wrap_future(job.outputs)
        except asyncio.CancelledError:
            return Response(status_code=CLIENT_LEFT)
        except TfmError as error:
            return error_response(500, error.problems[0])
    return JSONResponse(record(outputs))


def stream_answer(body: GenerateBody, request: Request, batcher: Batcher) -> Response:
    """Return lines of JSON: pieces of the output as soon as they are final, then the outputs."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[Sequence[int] | None]()

    def put(ids: Sequence[int] | None) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, ids)

    job = submit(body, batcher, progress=lambda ids: put(tuple(ids)))
    job.outputs.add_done_callback(lambda outputs: put(None))

    async def lines() -> AsyncIterator[str]:
        pieces = Pieces(batcher.translator)
        async with cancelled_if_left(job, request, batcher.metrics):
            while (ids := await steps.get()) is not None:
                if piece := pieces.next(ids):
                    yield line({"piece": piece})
            if not job.outputs.cancelled():
                for last in _last(job, pieces):
                    yield line(last)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _last(job: Job, pieces: Pieces) -> list[dict[str, object]]:
    try:
        outputs = job.outputs.result()
    except TfmError as error:
        return [error_record(error.problems[0])]
    return [{"piece": pieces.rest(outputs[0][0].text)}, record(outputs)]


def line(value: dict[str, object]) -> str:
    """Return a line of JSON."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def record(outputs: Outputs) -> dict[str, object]:
    """Return the body of a response: the nbest outputs of each text, best first."""
    return {"outputs": [[{"text": one.text, "score": one.score} for one in nbest] for nbest in outputs]}


@asynccontextmanager
async def cancelled_if_left(job: Job, request: Request, metrics: Metrics) -> AsyncIterator[None]:
    """Cancel a job when its client leaves, or when the context ends before the job."""

    def count(outputs: Future[Outputs]) -> None:
        if outputs.cancelled():
            metrics.cancelled.inc()

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.outputs.cancel()

    job.outputs.add_done_callback(count)
    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()
        job.outputs.cancel()


class Pieces:
    """The text of growing ids, piece by piece; an incomplete character waits for its end."""

    def __init__(self, translator: Translator) -> None:
        self.decode, self.sent = translator.tokenizer.decode, ""

    def next(self, ids: Sequence[int]) -> str:
        """Return the text that follows the pieces so far, without an incomplete last character."""
        return self.rest(self.decode(ids).rstrip("\ufffd"))

    def rest(self, text: str) -> str:
        """Return the part of a text that follows the pieces so far."""
        piece = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += piece
        return piece
