"""Responses with the outputs of a job, complete or streamed. If the client disconnects, its job is cancelled."""

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
from tfm_blocks.serving.errors import error_body, error_of, error_response
from tfm_blocks.serving.metrics import Metrics
from tfm_blocks.serving.requests import GenerateBody, submit
from tfm_blocks.serving.settings import CLIENT_CLOSED
from tfm_blocks.translation.translator import Translator, not_finite


async def respond(job: Job, request: Request, metrics: Metrics) -> Response:
    """Return the response with the outputs of a job."""
    async with cancel_on_disconnect(job, request, metrics):
        try:
            outputs = await asyncio.wrap_future(job.outputs)
        except asyncio.CancelledError:
            return Response(status_code=CLIENT_CLOSED)
        except TfmError as error:
            return error_response(500, error.problems[0])
    if not any(outputs):
        return error_response(500, not_finite("sentence 1"))
    return JSONResponse(outputs_body(outputs, job.warning))


def stream_response(body: GenerateBody, request: Request, batcher: Batcher) -> Response:
    """Stream lines of JSON: each piece of the output as soon as it is final, then the complete outputs."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[Sequence[int] | None]()

    def put(ids: Sequence[int] | None) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, ids)

    job = submit(body, batcher, progress=lambda ids: put(tuple(ids)))
    job.outputs.add_done_callback(lambda outputs: put(None))

    async def lines() -> AsyncIterator[str]:
        pieces = TextPieces(batcher.translator, [prompt for task in job.tasks for prompt in task.prompt])
        async with cancel_on_disconnect(job, request, batcher.metrics):
            while (ids := await steps.get()) is not None:
                if piece := pieces.next(ids):
                    yield json_line({"piece": piece})
            if not job.outputs.cancelled():
                for content in _last_lines(job, pieces):
                    yield json_line(content)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _last_lines(job: Job, pieces: TextPieces) -> list[dict[str, object]]:
    try:
        outputs = job.outputs.result()
    except TfmError as error:
        return [error_body(error.problems[0])]
    if not any(outputs):
        return [error_body(not_finite("sentence 1"))]
    return [{"piece": pieces.rest(outputs[0][0].text)}, outputs_body(outputs, job.warning)]


def json_line(value: dict[str, object]) -> str:
    """Return the value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def outputs_body(outputs: Outputs, warning: str) -> dict[str, object]:
    """Return the body of a response: the outputs of each text, best first, and the errors of texts without outputs.

    A warning is added unless it is empty.
    """
    body: dict[str, object] = {
        "outputs": [[{"text": output.text, "score": output.score} for output in nbest] for nbest in outputs]
    }
    if failed := [number for number, nbest in enumerate(outputs, 1) if not nbest]:
        body["errors"] = [error_of(not_finite(f"sentence {number}")) for number in failed]
    if warning:
        body["warning"] = warning
    return body


@asynccontextmanager
async def cancel_on_disconnect(job: Job, request: Request, metrics: Metrics) -> AsyncIterator[None]:
    """Cancel a job if its client disconnects, or if the context ends before the job."""

    def count(outputs: Future[Outputs]) -> None:
        if outputs.cancelled():
            metrics.cancelled.inc()

    async def cancel_after_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.outputs.cancel()

    job.outputs.add_done_callback(count)
    watcher = asyncio.create_task(cancel_after_disconnect())
    try:
        yield
    finally:
        watcher.cancel()
        job.outputs.cancel()


class TextPieces:
    """Splits the text of a growing list of ids after a prompt into pieces.

    An incomplete character is sent once it is complete.
    """

    def __init__(self, translator: Translator, prompt: Sequence[int]) -> None:
        self.decode, self.prompt, self.sent = translator.tokenizer.decode, prompt, ""

    def next(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` after the text that was already sent, without an incomplete last character."""
        return self.rest(self.decode(ids, self.prompt).rstrip("\ufffd"))

    def rest(self, text: str) -> str:
        """Return the part of `text` after the text that was already sent, and mark it as sent."""
        piece = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += piece
        return piece
