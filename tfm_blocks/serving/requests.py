"""Request bodies, and the jobs that they become."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tfm_blocks.data.tokenizer import unknown_warning
from tfm_blocks.errors import DataError, Problem, TfmError
from tfm_blocks.serving.batcher import Batcher, Job, Progress, ignore
from tfm_blocks.serving.errors import RequestRefusedError
from tfm_blocks.serving.settings import Limits
from tfm_blocks.translation.search import BOS, EOS
from tfm_blocks.translation.settings import LengthPenalty, Sampling, Search
from tfm_blocks.translation.stream import fitting, fitting_prompts
from tfm_blocks.translation.tasks import plain_texts, texts_of
from tfm_blocks.translation.translator import Translator, continuing

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Texts = Annotated[list[str], Field(min_length=1)]
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
        """Return the search settings. Raises DataError above a limit, and ValueError for values out of range."""
        expect_at_most("beam", self.beam, limits.beam)
        sampling = Sampling(**self.sampling.model_dump()) if self.sampling else None
        fields = {name: getattr(self, name) for name in SearchBody.model_fields if name != "sampling"}
        return Search(**fields, max_tokens=max_tokens, sampling=sampling)


class TranslateBody(SearchBody):
    """Texts to translate; if the model has several sources, each item is a list or a mapping of texts."""

    texts: Annotated[list[str | list[str] | dict[str, str]], Field(min_length=1)]
    prefixes: list[str] = []
    max_tokens: Count | None = None

    def job(self, translator: Translator, limits: Limits) -> Job:
        """Return the job of this request. Raises DataError above a limit, and ValueError or TypeError otherwise."""
        expect_at_most("number of texts", len(self.texts), limits.texts)
        expect_at_most("max_tokens", self.max_tokens or 1, limits.tokens)
        translator.expect_sources()
        search = self.search(self.max_tokens or limits.tokens, limits)
        longest = replace(search, max_tokens=limits.tokens)
        rows = fitting(texts_of(self.texts, translator.sources), translator, longest, "texts", strict=True)
        tasks = translator.translation_tasks(rows, search, prefixes=self.prefixes)
        return Job(tasks, len(rows), search)


class GenerateBody(SearchBody):
    """Prompts to continue by at most `tokens` tokens; `stream` sends pieces of the output of a single prompt."""

    prompts: Texts
    tokens: Count = 64
    stream: bool = False

    def job(self, translator: Translator, limits: Limits) -> Job:
        """Return the job of this request. Raises DataError above a limit, and ValueError or TypeError otherwise."""
        expect_at_most("number of prompts", len(self.prompts), limits.texts)
        expect_at_most("tokens", self.tokens, limits.tokens)
        if self.stream and (len(self.prompts) > 1 or self.beam > 1):
            raise ValueError("stream needs one prompt and beam 1: remove the other prompts, or leave stream out")
        search = self.search(limits.tokens, limits)
        prompts = fitting_prompts(plain_texts(self.prompts, "prompts"), translator, search, "prompts", strict=True)
        search = continuing(search, self.tokens)
        return Job(translator.generation_tasks(prompts, search), len(prompts), search)


def expect_at_most(name: str, value: int, limit: int) -> None:
    """Raise DataError if a value is above a limit of the server."""
    if value > limit:
        rule = f"must be at most {limit}, a limit of this server, but is {value}"
        raise DataError(Problem(name, rule, help="lower it, or split the request"))


def submit(body: TranslateBody | GenerateBody, batcher: Batcher, progress: Progress = ignore) -> Job:
    """Submit the job of a request. Raises RequestRefusedError with status 413, 422 or 429."""
    if batcher.unfinished() >= batcher.limits.requests:
        rule = f"{batcher.limits.requests} requests wait or run, the limit of this server"
        raise RequestRefusedError(429, Problem("", rule, help="try again"))
    try:
        job = body.job(batcher.translator, batcher.limits)
    except TfmError as error:
        raise RequestRefusedError(413 if isinstance(error, DataError) else 422, error.problems[0]) from None
    except (ValueError, TypeError) as error:
        raise RequestRefusedError(422, Problem("", str(error), help="docs/serving.md describes the settings")) from None
    job.progress = progress
    rows = [ids for task in job.tasks for ids in (*task.sources, task.before, task.prefix)]
    texts = [[id for id in ids if id not in (BOS, EOS)] for ids in rows]
    job.warning = unknown_warning("the texts", **batcher.translator.tokenizer.count_unknown(texts))
    batcher.submit(job)
    return job
