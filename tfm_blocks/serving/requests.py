"""Request bodies, the jobs that they become, and the responses, complete or streamed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from tfm_blocks.data.layout import SOURCE
from tfm_blocks.data.tokenizer import unknown_warning
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.errors import LimitError, Problem, TfmError, printable, run_error
from tfm_blocks.serving import CLIENT_CLOSED, Limits
from tfm_blocks.serving.batcher import Batcher, Job, Metrics, Outputs, Progress
from tfm_blocks.serving.readers import Reading, TextReader
from tfm_blocks.translation.encoder import Encoder, Pooling
from tfm_blocks.translation.settings import LengthPenalty, Sampling, Search
from tfm_blocks.translation.stream import fitting, fitting_prompts
from tfm_blocks.translation.tasks import plain_texts, texts_of
from tfm_blocks.translation.translator import Translator, continuing, not_finite

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
FAILURE = Problem("", "the server failed", help="its log has the reason")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingBody(BaseModel):
    """Sampling settings, equal to the options of `tfm translate --sample`."""

    model_config = STRICT
    temperature: float = Sampling.temperature
    top_k: Whole = Sampling.top_k
    top_p: float = Sampling.top_p
    seed: Whole = Sampling.seed


class SearchBody(BaseModel):
    """Search settings, equal to the options of `tfm translate`."""

    model_config = STRICT
    beam: Count = Search.beam
    nbest: Count = Search.nbest
    patient: bool = Search.patient
    alpha: float = Search.alpha
    penalty: LengthPenalty = Search.penalty
    coverage: float = Search.coverage
    sampling: SamplingBody | None = None

    def search(self, max_tokens: int, limits: Limits) -> Search:
        """Return the search settings. Raises LimitError above a limit, and ValueError for values out of range."""
        expect_at_most("beam", self.beam, limits.beam)
        sampling = Sampling(**self.sampling.model_dump()) if self.sampling else None
        fields = {name: getattr(self, name) for name in SearchBody.model_fields if name != "sampling"}
        return Search(**fields, max_tokens=max_tokens, sampling=sampling)

    def job(self, translator: Translator, limits: Limits) -> Job:
        """Return the job of this request. Raises LimitError above a limit, and ValueError or TypeError otherwise."""
        raise NotImplementedError


class TranslateBody(SearchBody):
    """Texts to translate; if the model has several sources, each item is a list or a mapping of texts."""

    texts: Annotated[list[str | list[str] | dict[str, str]], Field(min_length=1)]
    prefixes: list[str] = []
    max_tokens: Count | None = None

    def job(self, translator: Translator, limits: Limits) -> Job:
        expect_at_most("number of texts", len(self.texts), limits.texts)
        expect_at_most("max_tokens", self.max_tokens or 1, limits.tokens)
        translator.expect_sources()
        search = self.search(self.max_tokens or limits.tokens, limits)
        longest = replace(search, max_tokens=limits.tokens)
        rows = fitting(texts_of(self.texts, translator.sources), translator, longest, "texts", strict=True)
        tasks = translator.translation_tasks(rows, search, prefixes=self.prefixes)
        return Job(tasks, len(rows), search, translator.conventions.longest)


class GenerateBody(SearchBody):
    """Prompts to continue by at most `tokens` tokens; `stream` sends pieces of the output of a single prompt."""

    prompts: Annotated[list[str], Field(min_length=1)]
    tokens: Count = 64
    stream: bool = False

    def job(self, translator: Translator, limits: Limits) -> Job:
        expect_at_most("number of prompts", len(self.prompts), limits.texts)
        expect_at_most("tokens", self.tokens, limits.tokens)
        if self.stream and (len(self.prompts) > 1 or self.beam > 1):
            raise ValueError("stream needs one prompt and beam 1: remove the other prompts, or leave stream out")
        search = self.search(limits.tokens, limits)
        prompts = fitting_prompts(plain_texts(self.prompts, "prompts"), translator, search, "prompts", strict=True)
        search = continuing(search, self.tokens)
        return Job(translator.generation_tasks(prompts, search), len(prompts), search)


class ReadBody(BaseModel):
    """Texts that an encoder reads."""

    model_config = STRICT
    texts: Annotated[list[str], Field(min_length=1)]

    def reading(self, limits: Limits) -> Reading:
        """Return the work on each text. Raises LimitError above a limit."""
        raise NotImplementedError

    def job(self, reader: TextReader, limits: Limits) -> Job:
        """Return the job of this request.

        Raises LimitError above a limit, DataError for an unsuitable text, and RunError for an unsuitable run.
        """
        expect_at_most("number of texts", len(self.texts), limits.texts)
        reading = self.reading(limits)
        tasks = reader.tasks(plain_texts(self.texts, "texts"), reading.action)
        for task in tasks:
            expect_at_most(f"tokens of text {task.number}", task.tokens, limits.tokens)
        return Job(tasks, len(tasks), reading)


class ClassifyBody(ReadBody):
    """Texts to label."""

    def reading(self, limits: Limits) -> Reading:
        return Reading("classify")


class EmbedBody(ReadBody):
    """Texts to embed as vectors."""

    pooling: Pooling = "mean"

    def reading(self, limits: Limits) -> Reading:
        return Reading("embed", pooling=self.pooling)


class FillBody(ReadBody):
    """Texts with masks to fill; `top` tokens of each mask are returned."""

    top: Count = 1
    steps: Count = 1

    def reading(self, limits: Limits) -> Reading:
        expect_at_most("top", self.top, limits.beam)
        expect_at_most("steps", self.steps, limits.tokens)
        return Reading("fill", top=self.top, steps=self.steps)


def job_of(body: SearchBody | ReadBody, model: Translator | TextReader, limits: Limits) -> Job:
    """Return the job of a request. Raises RunError for an unsuitable model, and the errors of its body."""
    if isinstance(body, ReadBody):
        return body.job(model, limits) if isinstance(model, TextReader) else Encoder.refuse()
    if isinstance(model, TextReader):
        rule = "is an encoder, which writes no text"
        raise run_error("model", rule, "use /classify, /embed or /fill")
    return body.job(model, limits)


def expect_at_most(name: str, value: int, limit: int) -> None:
    """Raise LimitError if a value is above a limit of the server."""
    if value > limit:
        rule = f"must be at most {limit}, a limit of this server, but is {value}"
        raise LimitError(Problem(name, rule, help="lower it, or split the request"))


def submit(body: SearchBody | ReadBody, batcher: Batcher, progress: Progress | None = None) -> Job:
    """Submit the job of a request. Raises HTTPException with status 413, 422 or 429."""
    if batcher.unfinished() >= batcher.limits.requests:
        rule = f"{batcher.limits.requests} requests wait or run, the limit of this server"
        raise HTTPException(429, Problem("", rule, help="retry later"))
    try:
        job = job_of(body, batcher.translator, batcher.limits)
    except TfmError as error:
        raise HTTPException(413 if isinstance(error, LimitError) else 422, error.problems[0]) from None
    except (ValueError, TypeError) as error:
        raise HTTPException(422, Problem("", str(error), help="docs/serving.md describes the settings")) from None
    job.progress = progress or job.progress
    tokenizer, counts = batcher.translator.tokenizer, Counter[str]()
    for task in job.tasks:
        for side, rows in ((tokenizer.of(SOURCE), task.sources), (tokenizer, [task.before, task.prefix])):
            counts += side.count_unknown([id for id in ids if id not in (BOS, EOS)] for ids in rows)
    job.warning = unknown_warning("the texts", counts["tokens"], counts["unknown"])
    batcher.submit(job)
    return job


async def respond(body: SearchBody | ReadBody, request: Request, batcher: Batcher) -> Response:
    """Return the response with the outputs of a job."""
    job = submit(body, batcher)
    async with cancel_on_disconnect(job, request, batcher.metrics):
        try:
            await asyncio.wrap_future(job.outputs)
        except asyncio.CancelledError:
            return Response(status_code=CLIENT_CLOSED)
        except TfmError:
            pass  # the outcome has the error
    status, content = outcome(job)
    return JSONResponse(content, status)


def stream_response(body: GenerateBody, request: Request, batcher: Batcher) -> Response:
    """Stream lines of JSON: each piece of the output as soon as it is final, then the complete outputs.

    An incomplete character is sent once it is complete.
    """
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[Sequence[int] | None]()

    def put(ids: Sequence[int] | None) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, ids)

    job = submit(body, batcher, progress=lambda ids: put(tuple(ids)))
    job.outputs.add_done_callback(lambda outputs: put(None))
    prompt, sent = [id for task in job.tasks for id in task.prompt], ""

    def line(content: dict[str, Any]) -> str:
        return json.dumps(content, ensure_ascii=False) + "\n"

    def rest(text: str) -> str:
        """Return the part of the text after the text that was already sent, and mark it as sent."""
        nonlocal sent
        piece = text[len(sent) :] if text.startswith(sent) else ""
        sent += piece
        return piece

    async def lines() -> AsyncIterator[str]:
        async with cancel_on_disconnect(job, request, batcher.metrics):
            while (ids := await steps.get()) is not None:
                if piece := rest(batcher.translator.tokenizer.decode(ids, prompt).rstrip("\ufffd")):
                    yield line({"piece": piece})
            if not job.outputs.cancelled():
                try:
                    status, content = outcome(job)
                except Exception:
                    logging.getLogger("uvicorn.error").exception("a stream failed")
                    status, content = 500, {"error": error_of(FAILURE)}
                if status == 200:
                    yield line({"piece": rest(content["outputs"][0][0]["text"])})
                yield line(content)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def error_of(problem: Problem) -> dict[str, str]:
    """Return the JSON of a problem, without lone surrogates, which keys of a request may contain and UTF-8 lacks."""
    return {name: printable(getattr(problem, name)) for name in ("address", "rule", "help")}


def outcome(job: Job) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the response to a finished job: the outputs of each text, best first.

    The body has the errors of texts without outputs, and a warning unless it is empty.
    """
    try:
        outputs = job.outputs.result()
    except TfmError as error:
        return 500, {"error": error_of(error.problems[0])}
    if not any(outputs):
        return 500, {"error": error_of(not_finite("sentence 1"))}
    body: dict[str, Any] = {
        "outputs": [
            (nbest[0] if nbest else None)
            if isinstance(job.search, Reading)
            else [{"text": output.text, "score": output.score} for output in nbest]
            for nbest in outputs
        ]
    }
    if failed := [number for number, nbest in enumerate(outputs, 1) if not nbest]:
        body["errors"] = [error_of(not_finite(f"sentence {number}")) for number in failed]
    return 200, body | ({"warning": job.warning} if job.warning else {})


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
