"""Streaming translation: lines in, translated lines out."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TextIO

from tfm_blocks.data.files import UTF8_MARK, read_lines
from tfm_blocks.data.layout import SOURCE
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import EOS
from tfm_blocks.errors import DataError, LimitError, Place, Problem, counted, printable
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translation, Translator

BREAKING = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]")  # characters that break lines or columns
WORD = 64  # characters of a long word
READ = 1 << 16  # bytes per read: some hundred lines, enough for batches of similar length


def split_line(line: str, names: Sequence[str], number: int, *, strict: bool) -> tuple[str, ...]:
    """Return the text of each source; a wrong number of tabs gives blanks with a warning, or DataError if `strict`."""
    if len(names) == 1:
        return (line,)
    columns = tuple(line.split("\t"))
    if len(columns) == len(names) or not line:
        return columns if line else ("",) * len(names)
    rule = f"the line has {len(columns)} tab-separated texts, but the model reads {', '.join(names)}"
    if strict:
        raise DataError(Problem("stdin", rule, Place("stdin", number), help="paste FILE1 FILE2 | tfm translate RUN"))
    print(f"warning: stdin:{number}: {rule}: its translation is an empty line", file=sys.stderr)
    return ("",) * len(names)


def fitting(
    rows: Sequence[Sequence[str]],
    translator: Translator,
    search: Search,
    name: str,
    *,
    strict: bool,
    first_line: int = 1,
) -> list[tuple[str, ...]]:
    """Truncate texts to `max_tokens` and to the model's maximum length, with a warning.

    `strict` raises DataError instead.
    """
    limits = _longest_texts(translator)
    return [
        tuple(
            _fit(text, limit, translator.tokenizer.of(SOURCE), search, Place(name, number), strict=strict)
            for text, limit in zip(row, limits, strict=True)
        )
        for number, row in enumerate(rows, first_line)
    ]


def fitting_prompts(
    prompts: Sequence[str], translator: Translator, search: Search, name: str, *, strict: bool, first_line: int = 1
) -> list[str]:
    """Truncate prompts as `fitting` truncates texts; at least one token can follow."""
    longest = translator.network.longest(TARGET).tokens - len(translator.conventions.prompt([EOS])) + 1  # without bos
    return [
        _fit(prompt, longest, translator.tokenizer, search, Place(name, number), strict=strict)
        for number, prompt in enumerate(prompts, first_line)
    ]


def _longest_texts(translator: Translator) -> list[float]:
    """Return the maximum number of tokens of the text of each source, without eos; the others may be empty."""
    if translator.inputs:
        empty = dict.fromkeys(translator.inputs, 0)
        return [translator.network.longest(name, empty).tokens - 1 for name in translator.inputs]
    count = len(translator.sources)
    return [(translator.network.longest(TARGET).tokens - 1) / count - 1] * count  # bos, and an eos after each


def _fit(text: str, longest: float, tokenizer: Tokenizer, search: Search, place: Place, *, strict: bool) -> str:
    most = int(min(search.max_tokens, longest))
    ids = tokenizer.encode(text) if 4 * len(text) > most else []  # a character has at most four bytes
    if len(ids) <= most:
        return text
    limit = "--max-tokens" if search.max_tokens <= longest else "the model's positions"
    rule = f"the line has {len(ids)} tokens, but the maximum is {most}, by {limit}"
    if strict:
        help = "split the line, or raise --max-tokens" if search.max_tokens < longest else "split the line"
        raise LimitError(Problem(place.file, rule, place, help=help))
    print(printable(f"warning: {place.file}:{place.line}: {rule}: the rest is cut"), file=sys.stderr)
    return _beginning(text, most, tokenizer)


def _beginning(text: str, most: int, tokenizer: Tokenizer) -> str:
    """Return the beginning of `text` that has at most `most` tokens; the whole text has more."""

    def fits(length: int) -> bool:
        return len(tokenizer.encode(text[:length])) <= most

    fitting, longer = 0, max(most, 1)
    while fits(longer):
        fitting, longer = longer, 2 * longer
    while longer - fitting > 1:
        middle = (fitting + longer) // 2
        fitting, longer = (middle, longer) if fits(middle) else (fitting, middle)
    lengths = range(fitting + WORD, fitting, -1)  # a part of a word can have more tokens than the word
    return text[: next(filter(fits, lengths), fitting)]


@dataclass(frozen=True)
class Translating:
    """Translates each line; for a model with several sources, tabs separate their texts."""

    translator: Translator
    search: Search
    batch_tokens: int
    strict: bool

    def outputs(self, lines: Sequence[str], prefixes: Sequence[str], first: int) -> list[list[Translation]]:
        """Return the nbest outputs of each line; lines count from `first`."""
        names = self.translator.sources
        split = [split_line(line, names, number, strict=self.strict) for number, line in enumerate(lines, first)]
        rows = fitting(split, self.translator, self.search, "stdin", strict=self.strict, first_line=first)
        for number, (row, prefix) in enumerate(zip(rows, prefixes, strict=False), first):
            if prefix.strip() and not any(text.strip() for text in row):
                print(f"warning: stdin:{number}: the line is blank, so its prefix is ignored", file=sys.stderr)
        return self.translator.search(
            rows, self.search, prefixes=prefixes, batch_tokens=self.batch_tokens, first_line=first
        )


@dataclass(frozen=True)
class Generating(Translating):
    """Continues each line, a prompt, by at most `tokens` tokens; outputs the prompt and the continuation."""

    tokens: int

    def outputs(self, lines: Sequence[str], prefixes: Sequence[str], first: int) -> list[list[Translation]]:
        prompts = fitting_prompts(lines, self.translator, self.search, "stdin", strict=self.strict, first_line=first)
        for number, prompt in enumerate(prompts, first):
            if BREAKING.search(prompt):
                rule = "the prompt has control characters, such as tabs, which are printed as spaces"
                print(f"warning: stdin:{number}: {rule}", file=sys.stderr)
        continuations = self.translator.generate(
            prompts, self.tokens, self.search, batch_tokens=self.batch_tokens, first_line=first
        )
        return [
            [replace(output, text=prompt + output.text) for output in nbest]
            for prompt, nbest in zip(prompts, continuations, strict=True)
        ]


def stream(
    work: Translating,
    source: Iterable[list[str]],
    target: TextIO,
    *,
    prefix: Path | None,
    scores: bool,
    tell: Callable[[int], object],
) -> None:
    """Write the outputs of each chunk of lines, and pass the number of lines done to `tell`. Raises DataError."""
    prefixes = read_lines(prefix, "--prefix") if prefix else None
    first = 1
    with packed(work.translator.network):
        for chunk in source:
            begins = _next_prefixes(prefixes, len(chunk), first, str(prefix)) if prefixes else []
            for number, nbest in enumerate(work.outputs(chunk, begins, first), first):
                for output in nbest:
                    several = work.search.nbest > 1
                    columns = [str(number)] * several + [f"{output.score:.4f}"] * (several or scores)
                    target.write("\t".join([*columns, BREAKING.sub(" ", output.text)]) + "\n")
            target.flush()
            first += len(chunk)
            tell(first - 1)
    if prefixes and next(prefixes, None) is not None:
        rule = f"has more lines than the {first - 1} of stdin"
        raise DataError(Problem(str(prefix), rule, Place(str(prefix), first)))


def chunks(source: BinaryIO, name: str, *, strict: bool) -> Iterator[list[str]]:
    """Yield the available lines, up to READ bytes at a time; wait until there is at least one line.

    A line that is not UTF-8 becomes empty with a warning, or raises DataError if `strict`.
    """
    rest, number = b"", 1
    while data := os.read(source.fileno(), READ):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield from _decoded(lines, name, number, strict)
            number += len(lines)
    if rest:
        yield from _decoded([rest], name, number, strict)


def typed() -> Iterator[list[str]]:
    """Yield the lines typed at a prompt, one at a time, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  adds history and line editing to `input`; not on every system
    assert isinstance(sys.stdin, TextIOWrapper)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    print("one sentence per line; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            yield [input("> " if sys.stdout.isatty() else "")]
        except EOFError:
            return


def _decoded(lines: Sequence[bytes], name: str, first: int, strict: bool) -> Iterator[list[str]]:
    """Yield the decoded lines; if `strict`, yield those before an invalid line, then raise."""
    chunk: list[str] = []
    for number, line in enumerate(lines, first):
        try:
            chunk.append((line.removeprefix(UTF8_MARK) if number == 1 else line).decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError:
            rule = "the line is not UTF-8 text"
            if strict:
                yield chunk
                raise DataError(Problem(name, rule, Place(name, number), help="iconv -f latin1 -t utf-8")) from None
            print(printable(f"warning: {name}:{number}: {rule}: it is read as an empty line"), file=sys.stderr)
            chunk.append("")
    yield chunk


def _next_prefixes(prefixes: Iterator[str], count: int, first: int, name: str) -> list[str]:
    lines = list(islice(prefixes, count))
    if len(lines) < count:
        rule = f"ends after {counted(first - 1 + len(lines), 'line')}, but stdin has more"
        raise DataError(Problem(name, rule, help="a prefix file needs a line, empty or not, for each line of stdin"))
    return lines
